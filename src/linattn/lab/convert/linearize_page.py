"""The page about a conversion: what it cost, and what it gained."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas

from linattn.convert.evaluate.evaluator import NO_LINEAR, NO_SALIENT
from linattn.lab.convert.curves import Curves, chart, freedom_chart
from linattn.lab.page import Section
from linattn.lab.page.numbers import binary
from linattn.lab.page.plots import Chart

Row = Mapping[str, Any]
STAGES = (
    "Teacher: the model as it was. Converted: its attention replaced, nothing trained. Transfer: each layer taught the "
    "output of the softmax it replaces. Finetune: all layers together, through low-rank updates. Perplexity: windows "
    "of held-out text, nothing before them. Cache and speed are those of the longest context that was measured."
)
ABLATION = (
    "The same model with parts of its attention switched off. A part counts if what it adds is more than twice its "
    "standard error, window by window and needle by needle; else it may be chance."
)
LAYERS = (
    "Missed: the share of the teacher's output that a layer does not reproduce, on held-out text; 0 is exact, 1 is as "
    "bad as no output."
)
QUALITY = (
    "Perplexity: lower is better; a converted model whose line rises where the teacher's does not forgets what is far "
    "away. Needles: how often a number hidden in a long text is given back to the last digit; noise is five sentences "
    "that repeat, text is ordinary text of those measured on."
)
COST = (
    "Left: all that is kept of a sequence to go on from, over all layers; a flat line is a memory of fixed size. "
    "Right: higher is faster; one sequence at a time."
)
TRANSFER = (
    "Left: how much of the softmax output each layer misses, before and after it was taught; layers learn "
    "independently. Right: the loss on the way, of layers from the first to the last."
)
SAMPLES = "Greedy decoding: the likeliest token each time, so that no draw tells them apart."


def sections(results: Row) -> list[Section]:
    """What ``report.json`` has, as tables, charts and texts."""
    stages, ablation = results.get("stages") or [], results.get("ablation")
    parts = [Section("Stage by stage", STAGES, _stages(stages))] if stages else []
    charts = [_quality(stages), _cost(stages), _transfer(results["transfer"]), _freedom(results)]
    parts += [Section(each.title, chart=each) for each in charts if each is not None]
    if ablation:
        parts.append(Section("Is it the linear part?", ABLATION, _ablation(ablation)))
    if samples := list(_samples(stages)):
        parts.append(Section("Samples side by side", "\n\n".join([*samples, SAMPLES])))
    return [*parts, Section("Layer by layer", LAYERS, _layers(results))]


def lead(results: Row) -> str:
    """In a few sentences: how much was converted, what was kept and what was lost."""
    meta, stages = results["meta"], results.get("stages") or []
    words = [f"{meta['converted']:,} attention layers were converted."]
    if tokens := meta.get("training_tokens"):
        words.append(f"{tokens:,} tokens were read in training, repeats counted.")
    first, last = (stages[0], stages[-1]) if len(stages) > 1 else ({}, {})
    for teacher, other in zip(first.get("perplexity") or [], last.get("perplexity") or [], strict=False):
        a, b = teacher["perplexity"], other["perplexity"]
        change = f"{100 * (b / a - 1):+.1f} %".replace("-", "−")
        words.append(f"Perplexity at {other['length']:,} tokens went from {a:.2f} to {b:.2f} ({change}).")
    teachers = {row["context"]: row for row in first.get("decoding") or []}
    for row in [row for row in last.get("decoding") or [] if row["context"] in teachers][-1:]:
        teacher = teachers[row["context"]]
        words.append(
            f"After {row['context']:,} tokens the cache holds {binary(row['cache_bytes'])}, the teacher's "
            f"{binary(teacher['cache_bytes'])}, and decoding runs at "
            f"{row['tokens_per_second'] / teacher['tokens_per_second']:.2f} times the teacher's speed."
        )
    if last.get("agreement"):
        words.append(f"Sentence vectors have a mean cosine of {last['agreement']['mean']:.4f} to the teacher's.")
    return " ".join([*words, *_idle_parts((results.get("ablation") or {}).get("worth") or [])])


def _idle_parts(worth: Sequence[Row]) -> Iterator[str]:
    """Sentences about parts that do not help: each must improve perplexity, and retrieval from each haystack, at one
    length at least."""
    for name, words in ((NO_LINEAR, "the linear part adds"), (NO_SALIENT, "the salient tokens add")):
        for figure, haystack in dict.fromkeys((each["figure"], each.get("haystack")) for each in worth):
            kind = {"figure": figure, "haystack": haystack, "without": name}
            alike = [each for each in worth if {key: each.get(key) for key in kind} == kind]
            if alike and not any(each["counts"] for each in alike):
                gained = f"retrieval in {haystack}" if haystack else figure
                yield f"What {words} to {gained} is not more than chance."


def _figures(row: Row) -> dict[str, float]:
    """Perplexity and needles of a stage or a variant, by the titles of their columns."""
    windows = {f"perplexity at {each['length']:,}": each["perplexity"] for each in row.get("perplexity") or []}
    return windows | {
        f"needles in {each['haystack']} at {each['length']:,}, %": 100 * each["found"]
        for each in row.get("needle_by_length") or []
    }


def _stages(stages: Sequence[Row]) -> pandas.DataFrame:
    place = max((row["context"] for stage in stages for row in stage.get("decoding") or []), default=0)
    rows = []
    for stage in stages:
        reached = next((row for row in stage.get("decoding") or [] if row["context"] == place), None)
        rows.append({
            "stage": stage["name"], **_figures(stage),
            f"cache at {place:,}, MiB": reached and reached["cache_bytes"] / 2**20,
            f"tokens/s at {place:,}": reached and reached["tokens_per_second"], "time, s": stage.get("seconds"),
            "cosine to the teacher": (stage.get("agreement") or {}).get("mean"), "probe, % right": stage.get("probe"),
            "largest class of the probe, %": stage.get("probe_largest_class"),
        })  # fmt: skip
    return pandas.DataFrame(rows).dropna(axis="columns", how="all")


def _ablation(ablation: Row) -> pandas.DataFrame:
    rows = []
    for name, variant in ablation["variants"].items():
        row = {"attention": name, **_figures(variant)}
        for each in ablation["worth"]:
            needle = each["figure"] == "needle"
            title = f"needles in {each['haystack']} lost" if needle else "nats lost"
            decimals, chance = 2 if needle else 4, "" if each["counts"] else " (may be chance)"
            if each["without"] == name:
                spread = f"{each['gain']:+.{decimals}f} ± {each['error']:.{decimals}f}{chance}"
                row[f"{title} at {each['length']:,}"] = spread
        rows.append(row)
    return pandas.DataFrame(rows)


def _layers(results: Row) -> pandas.DataFrame:
    curves = {str(curve["layer"]): curve for curve in results["transfer"]}
    rows = []
    for name, plan in results["plan"]["layers"].items():
        curve = curves.get(name, {})
        rows.append({"layer": name, "attention": plan_words(plan), "missed before transfer": curve.get("before"),
                     "missed after transfer": curve.get("after")})  # fmt: skip
    return pandas.DataFrame(rows).dropna(axis="columns", how="all")


def plan_words(plan: Row) -> str:
    """Describe a layer's plan; fields that are missing have their defaults.

    Example:
        >>> plan_words({"kind": "hybrid", "ratio": 0.0625})
        'np features, window 64, 1/16 kept'
    """
    if plan["kind"] == "mechanism":
        return str(plan["mechanism"])
    size = f" of {plan['feature_dim']}" if plan.get("feature_dim") else ""
    features = plan.get("features", "np")
    parts = {
        "no linear part" if features == "none" else f"{features} features{size}": True,
        f"window {plan.get('window', 64)}": plan.get("window", 64),
        f"1/{1 / plan['ratio']:g} kept" if plan.get("ratio") else "": plan.get("ratio"),
        f"at most {plan.get('cap')} kept": plan.get("cap"),
    }
    return ", ".join(words for words, there in parts.items() if there)


def _samples(stages: Sequence[Row]) -> Iterator[str]:
    """What the teacher and the last stage write after the same prompts."""
    writing = [stage for stage in stages if stage.get("samples")]
    for number, sample in enumerate(writing[0]["samples"] if writing else ()):
        yield f"{sample['prompt']} …"
        for stage in dict.fromkeys((0, len(writing) - 1)):
            yield f"{writing[stage]['name']}: {writing[stage]['samples'][number]['text']}"


def _curves(stages: Sequence[Row], field: str, x: str, y: str, factor: float = 1.0, **alike: str) -> Curves:
    return {
        stage["name"]: [
            (row[x], factor * row[y])
            for row in stage.get(field) or []
            if alike.items() <= {key: value for key, value in row.items() if key in alike}.items()
        ]
        for stage in stages
    }


def _quality(stages: Sequence[Row]) -> Chart | None:
    haystacks = dict.fromkeys(row["haystack"] for stage in stages for row in stage.get("needle_by_length") or [])
    return chart(
        "quality", "Quality by length", QUALITY,
        ("Perplexity", "tokens of a window", _curves(stages, "perplexity", "length", "perplexity"), {}),
        *(
            (f"Needles found in {haystack}, %", "tokens of the text",
             _curves(stages, "needle_by_length", "length", "found", 100.0, haystack=haystack), {"limits": (-4, 104)})
            for haystack in haystacks
        ),
    )  # fmt: skip


def _cost(stages: Sequence[Row]) -> Chart | None:
    ends = [*stages[:1], *stages[1:][-1:]]  # those between them have the last one's shapes
    return chart(
        "cost", "Memory and speed of decoding", COST,
        ("Cache of one sequence", "tokens before", _curves(ends, "decoding", "context", "cache_bytes"),
         {"shown": binary, "log": 2}),
        ("Decoded tokens per second", "tokens before", _curves(ends, "decoding", "context", "tokens_per_second"), {}),
    )  # fmt: skip


def _transfer(layers: Sequence[Row], shown: int = 4) -> Chart | None:
    ends: Curves = {f"{name} transfer": [(row["layer"], row[name]) for row in layers] for name in ("before", "after")}
    learned = [row for row in layers if len(row["losses"]) > 1]
    some = {round(i * (len(learned) - 1) / (shown - 1)) for i in range(shown)} if learned else set()
    losses: Curves = {}
    for row in (learned[place] for place in sorted(some)):
        steps = range(0, len(row["losses"]), max(1, len(row["losses"]) // 60))
        losses[f"layer {row['layer']}"] = [(step, row["losses"][step]) for step in steps]
    return chart(
        "transfer", "What each layer learned", TRANSFER,
        ("Missed share of the output", "layer", ends, {"log": 10, "integer": True}),
        ("Loss of some layers", "step", losses, {"log": 10, "integer": True}),
    )  # fmt: skip


def _freedom(results: Row) -> Chart | None:
    """The chart of a conversion whose dimensions were chosen by degrees of freedom."""
    measured = (results.get("degrees") or {}).get("layers") or []
    dims = {int(layer): plan.get("feature_dim") for layer, plan in results["plan"]["layers"].items()}
    degrees = {row["layer"]: row["degrees"] for row in measured}
    return freedom_chart(degrees, {layer: dim for layer, dim in dims.items() if dim}) if measured else None
