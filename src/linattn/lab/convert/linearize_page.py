"""The page about a conversion: what it cost, and what it gained."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas

from linattn.lab.convert.curves import Curves, chart, freedom_chart
from linattn.lab.page import Section
from linattn.lab.page.numbers import binary

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
    stages = results.get("stages") or []
    parts = [Section("Stage by stage", STAGES, _stages(stages))] if stages else []
    parts += [Section(each.title, chart=each) for each in _charts(results, stages) if each is not None]
    if results.get("ablation"):
        parts.append(Section("Is it the linear part?", ABLATION, _ablation(results["ablation"])))
    if samples := list(_samples(stages)):
        parts.append(Section("Samples side by side", "\n\n".join([*samples, SAMPLES])))
    missed = {str(curve["layer"]): curve for curve in results["transfer"]}
    layers = [
        {"layer": name, "attention": plan_words(plan), "missed before transfer": missed.get(name, {}).get("before"),
         "missed after transfer": missed.get(name, {}).get("after")}
        for name, plan in results["plan"]["layers"].items()
    ]  # fmt: skip
    return [*parts, Section("Layer by layer", LAYERS, _measured(layers))]


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
    return " ".join(words)


def _measured(rows: Sequence[Row]) -> pandas.DataFrame:
    """A table without the columns that have no value."""
    return pandas.DataFrame(rows).dropna(axis="columns", how="all")


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
    return _measured(rows)


def _ablation(ablation: Row) -> pandas.DataFrame:
    rows = {name: {"attention": name, **_figures(variant)} for name, variant in ablation["variants"].items()}
    for each in ablation["worth"]:
        needle = each["figure"] == "needle"
        lost, digits = (f"needles in {each['haystack']}", 2) if needle else ("nats", 4)
        chance = "" if each["counts"] else " (may be chance)"
        gain = f"{each['gain']:+.{digits}f} ± {each['error']:.{digits}f}{chance}"
        rows[each["without"]][f"{lost} lost at {each['length']:,}"] = gain
    return pandas.DataFrame(rows.values())


def plan_words(plan: Row) -> str:
    """Describe a layer's plan; fields that are missing have their defaults.

    Example:
        >>> plan_words({"kind": "hybrid", "ratio": 0.0625})
        'np features, window 64, 1/16 kept'
    """
    if plan["kind"] == "mechanism":
        return str(plan["mechanism"])
    features, window = plan.get("features", "np"), plan.get("window", 64)
    size = f" of {plan['feature_dim']}" if plan.get("feature_dim") else ""
    parts = ["no linear part" if features == "none" else f"{features} features{size}"]
    parts += [f"window {window}"] * bool(window)
    parts += [f"1/{1 / plan['ratio']:g} kept"] if plan.get("ratio") else []
    return ", ".join(parts + ([f"at most {plan['cap']} kept"] if plan.get("cap") else []))


def _samples(stages: Sequence[Row]) -> Iterator[str]:
    """What the teacher and the last stage write after the same prompts."""
    writing = [stage for stage in stages if stage.get("samples")]
    for number, sample in enumerate(writing[0]["samples"] if writing else ()):
        yield f"{sample['prompt']} …"
        for stage in writing[:1] + writing[1:][-1:]:
            yield f"{stage['name']}: {stage['samples'][number]['text']}"


def _charts(results: Row, stages: Sequence[Row]) -> Iterator[Any]:
    """Quality, cost, what layers learned and, where dimensions were chosen by them, degrees of freedom."""

    def lines(field: str, x: str, y: str, factor: float = 1.0, haystack: str | None = None) -> Curves:
        return {stage["name"]: [(row[x], factor * row[y]) for row in stage.get(field) or []
                                if row.get("haystack") == haystack] for stage in stages}  # fmt: skip

    haystacks = dict.fromkeys(row["haystack"] for stage in stages for row in stage.get("needle_by_length") or [])
    yield chart(
        "quality", "Quality by length", QUALITY,
        ("Perplexity", "tokens of a window", lines("perplexity", "length", "perplexity"), {}),
        *((f"Needles found in {haystack}, %", "tokens of the text",
           lines("needle_by_length", "length", "found", 100.0, haystack), {"limits": (-4, 104)})
          for haystack in haystacks),
    )  # fmt: skip
    yield chart(
        "cost", "Memory and speed of decoding", COST,
        ("Cache of one sequence", "tokens before", lines("decoding", "context", "cache_bytes"),
         {"shown": binary, "log": 2}),
        ("Decoded tokens per second", "tokens before", lines("decoding", "context", "tokens_per_second"), {}),
    )  # fmt: skip
    layers = results["transfer"]
    ends: Curves = {f"{name} transfer": [(row["layer"], row[name]) for row in layers] for name in ("before", "after")}
    learned = [row for row in layers if len(row["losses"]) > 1]
    losses: Curves = {}
    for row in learned[:: max(1, len(learned) // 4)]:
        steps = range(0, len(row["losses"]), max(1, len(row["losses"]) // 60))
        losses[f"layer {row['layer']}"] = [(step, row["losses"][step]) for step in steps]
    rule = {"log": 10, "integer": True}
    yield chart(
        "transfer", "What each layer learned", TRANSFER, ("Missed share of the output", "layer", ends, rule),
        ("Loss of some layers", "step", losses, rule),
    )  # fmt: skip
    if measured := (results.get("degrees") or {}).get("layers"):
        plans = results["plan"]["layers"].items()
        dims = {int(layer): plan["feature_dim"] for layer, plan in plans if plan.get("feature_dim")}
        yield freedom_chart({row["layer"]: row["degrees"] for row in measured}, dims)
