"""Tables of a conversion, and its result in a sentence."""

from collections.abc import Mapping, Sequence
from typing import Any

from linattn.convert.evaluate.ablation import NO_LINEAR, NO_SALIENT
from linattn.lab.convert.report.haystacks import haystack_of, haystack_words
from linattn.lab.convert.report.panels import TEACHER, stage_styles
from linattn.lab.page.markup import Markup, element
from linattn.lab.page.numbers import MISSING, Unit, binary
from linattn.lab.page.plots import key
from linattn.lab.page.style import OUTLINES
from linattn.lab.pages.table import Cell, Column, table

Row = Mapping[str, Any]


def stage_table(results: Mapping[str, Any]) -> Markup:
    """A table with one row per stage."""
    stages: list[Row] = results.get("stages") or []
    names = [stage["name"] for stage in stages]
    look = stage_styles(names)
    heads = [key(name, look[name], OUTLINES[look[name].marker]) for name in names]
    columns = _figures(stages)
    last = [(stage.get("decoding") or [{}])[-1] for stage in stages]
    if any(last):
        place = max(row.get("context", 0) for row in last)
        reached = [row if row.get("context") == place else {} for row in last]
        sizes = [row.get("cache_bytes") for row in reached]
        columns.append(Column("cache", f"at {place:,}", [Cell(binary(s) if s else MISSING, s) for s in sizes]))
        columns.append(_column("decoding", f"tokens/s at {place:,}", [r.get("tokens_per_second") for r in reached], 1))
    columns.append(_column("time", "s", [s.get("seconds") for s in stages], 0))
    columns.append(_column("cosine", "to the teacher", [(s.get("agreement") or {}).get("mean") for s in stages], 4))
    columns.append(_column("probe", "% right", [s.get("probe") for s in stages], 2))
    columns.append(_column("largest class", "% of the probe's", [s.get("probe_largest_class") for s in stages], 2))
    columns = [column for column in columns if any(cell.value is not None for cell in column.cells)]
    return table("Stages", "stage", heads, names, columns)


def ablation_table(results: Mapping[str, Any]) -> Markup | None:
    """A table with one row per variant, and what each variant lacks."""
    ablation: Row = results.get("ablation") or {}
    variants: Mapping[str, Row] = ablation.get("variants") or {}
    if not variants:
        return None
    names, columns = list(variants), _figures(list(variants.values()))
    for figure, unit, decimals in (("perplexity", "nats lost", 4), ("needle", "share lost", 2)):
        worth = [each for each in ablation["worth"] if each["figure"] == figure]
        words = haystack_words(worth)
        for haystack, length in dict.fromkeys((haystack_of(each), each["length"]) for each in worth):
            own = [each for each in worth if (haystack_of(each), each["length"]) == (haystack, length)]
            cells = [_worth(own, name, decimals) for name in names]
            columns.append(Column(figure + words[haystack], f"{unit} at {length:,}", cells))
    return table("Ablations", "attention", names, names, columns)


def _worth(worth: Sequence[Row], name: str, decimals: int) -> Cell:
    for each in worth:
        if each["without"] == name:
            error = each["error"]
            spread = f" ± {error:.{decimals}f}" if isinstance(error, float) else ""
            return Cell(
                f"{each['gain']:+.{decimals}f}{spread}{'' if each['counts'] else ' (may be chance)'}", each["gain"]
            )
    return Cell(MISSING)


def _figures(rows: Sequence[Row]) -> list[Column]:
    """Columns of perplexity and needles of stages or variants: one per length, for needles also per haystack."""
    columns = []
    for field, value, title, unit, factor, decimals in (
        ("perplexity", "perplexity", "perplexity", "at {:,}", 1.0, 3),
        ("needle_by_length", "found", "needles found", "% at {:,}", 100.0, 0),
    ):
        measured = [each for row in rows for each in row.get(field) or []]
        words = haystack_words(measured)
        for place in dict.fromkeys((haystack_of(each), each["length"]) for each in measured):
            found = []
            for row in rows:
                own = [each[value] for each in row.get(field) or [] if (haystack_of(each), each["length"]) == place]
                found.append(factor * own[0] if own and isinstance(own[0], int | float) else None)
            haystack, length = place
            columns.append(_column(title + words[haystack], unit.format(length), found, decimals))
    return columns


def _column(title: str, unit: str, values: Sequence[float | None], decimals: int) -> Column:
    return Column(title, unit, [Cell(Unit(decimals=decimals).text(value), value) for value in values])


def layer_table(results: Mapping[str, Any]) -> Markup | None:
    """A table with one row per layer: what it was converted to, and what it misses."""
    plans: Mapping[str, Row] = (results.get("plan") or {}).get("layers") or {}
    curves = {str(curve["layer"]): curve for curve in results.get("transfer") or []}
    names = list(dict.fromkeys([*plans, *curves]))
    if not names:
        return None
    columns = [Column("attention", "", [Cell(plan_words(plans.get(name, {})), None) for name in names])]
    for field in ("before", "after"):
        values = [curves.get(name, {}).get(field) for name in names]
        numbers = [value if isinstance(value, float) else None for value in values]
        columns.append(_column("missed", f"{field} transfer", numbers, 4))
    if not curves:
        columns = columns[:1]
    return table("Layers", "layer", names, names, columns)


def plan_words(plan: Row) -> str:
    """Describe a layer's plan; fields that are missing have their defaults.

    Example:
        >>> plan_words({"kind": "hybrid", "ratio": 0.0625})
        'np features, window 64, 1/16 kept'
        >>> plan_words({"kind": "mechanism", "mechanism": "mirror"})
        'mirror'
    """
    if not plan or plan["kind"] == "mechanism":
        return str(plan.get("mechanism", "")) if plan else ""
    size = f" of {plan['feature_dim']}" if plan.get("feature_dim") else ""
    features = plan.get("features", "np")
    words = ["no linear part" if features == "none" else f"{features} features{size}"]
    if window := plan.get("window", 64):
        words.append(f"window {window}")
    if ratio := plan.get("ratio"):
        words.append(f"1/{1 / ratio:g} kept")
    if cap := plan.get("cap"):
        words.append(f"at most {cap} kept")
    return ", ".join(words)


def samples_of(results: Mapping[str, Any]) -> Markup | None:
    """What the teacher and the last stage write after the same prompts."""
    stages: list[Row] = [stage for stage in results.get("stages") or [] if stage.get("samples")]
    if not stages:
        return None
    shown = [stages[0], stages[-1]] if len(stages) > 1 else stages
    parts = []
    for i, sample in enumerate(shown[0]["samples"]):
        parts.append(element("p", f"{sample['prompt']} …", class_="lead"))
        written = [
            element("div", element("b", stage["name"]), element("p", stage["samples"][i]["text"]), class_="panel")
            for stage in shown
        ]
        parts.append(element("div", *written, class_="panels"))
    reading = element("p", "Greedy decoding: the likeliest token each time, so that no draw tells them apart.",
                      class_="reading")  # fmt: skip
    return element("section", element("h2", "Samples side by side"), *parts, reading, id="samples")


def verdict(results: Mapping[str, Any]) -> str:
    """Say in a sentence or two what was kept and what was lost."""
    stages: list[Row] = results.get("stages") or []
    if len(stages) < 2 or stages[0]["name"] != TEACHER:
        return ""
    first, last, words = stages[0], stages[-1], []
    for teacher, own in zip(first.get("perplexity") or [], last.get("perplexity") or [], strict=False):
        a, b = teacher["perplexity"], own["perplexity"]
        if isinstance(a, float) and isinstance(b, float):
            change = f"{100 * (b / a - 1):+.1f} %".replace("-", "−")
            words.append(f"Perplexity at {own['length']:,} tokens went from {a:.2f} to {b:.2f} ({change}).")
    if first.get("decoding") and last.get("decoding"):
        places = {row["context"]: row for row in first["decoding"]}
        row = next((row for row in reversed(last["decoding"]) if row["context"] in places), None)
        if row is not None:
            teacher = places[row["context"]]
            words.append(
                f"After {row['context']:,} tokens the cache holds {binary(row['cache_bytes'])}, the teacher's "
                f"{binary(teacher['cache_bytes'])}, and decoding runs at "
                f"{row['tokens_per_second'] / teacher['tokens_per_second']:.2f} times the teacher's speed."
            )
    if last.get("agreement"):
        words.append(f"Sentence vectors have a mean cosine of {last['agreement']['mean']:.4f} to the teacher's.")
    return " ".join([*words, *_parts_that_fail(results)])


def _parts_that_fail(results: Mapping[str, Any]) -> list[str]:
    """Sentences about parts that do not help: each must improve perplexity and retrieval at one length at least.

    Retrieval from each haystack counts as a figure of its own.
    """
    worth = (results.get("ablation") or {}).get("worth") or []
    haystacks = haystack_words(each for each in worth if each["figure"] == "needle")
    idle = []
    for name, words in ((NO_LINEAR, "the linear part adds"), (NO_SALIENT, "the salient tokens add")):
        for kind in dict.fromkeys((each["figure"], haystack_of(each)) for each in worth):
            own = [each for each in worth if each["without"] == name and (each["figure"], haystack_of(each)) == kind]
            if own and not any(each["counts"] for each in own):
                figure, haystack = kind
                gained = f"retrieval{haystacks[haystack]}" if figure == "needle" else figure
                idle.append(f"What {words} to {gained} is not more than chance.")
    return idle
