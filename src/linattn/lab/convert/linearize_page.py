"""The page about a conversion: what it cost, and what it gained."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import pandas

from linattn.lab.convert.curves import Curves, chart
from linattn.lab.page import Section
from linattn.lab.page.numbers import binary

Row = Mapping[str, Any]
STAGES = (
    "Teacher: the model as it was. Converted: its attention replaced, nothing trained. Transfer: each layer taught the "
    "output of the softmax it replaces. Finetune: all layers together, through low-rank updates. Perplexity, lower is "
    "better: windows of held-out text, nothing before them. Needles: how often a number hidden in a long text is given "
    "back to the last digit; noise is five sentences that repeat, text is text of those measured on. Cache and speed "
    "are those of the longest context that was measured."
)
ABLATION = (
    "The same model with parts of its attention switched off. A part counts if what it adds is more than twice its "
    "standard error, window by window and needle by needle; else it may be chance."
)
LAYERS = (
    "Missed: the share of the teacher's output that a layer does not reproduce, on held-out text; 0 is exact, 1 is as "
    "bad as no output. Degrees of freedom, of its heads: about as many features as the softmax takes."
)
QUALITY = (
    "Perplexity: a line that rises where the teacher's does not forgets what is far away. Needles: how many were found."
)
SAMPLES = "Greedy decoding: the likeliest token each time, so that no draw tells them apart."
COST = (
    "Left: all that is kept of a sequence to go on from, over all layers; a flat line is a memory of fixed size. "
    "Right: higher is faster; one sequence at a time."
)
TRANSFER = "Layers learn independently of one another; drawn are some, from the first to the last."


def sections(results: Row) -> list[Section]:
    """What ``report.json`` has, as tables and charts."""
    stages = results.get("stages") or []
    parts = [Section("Stage by stage", STAGES, _stages(stages))] if stages else []
    parts += _charts(results, stages)
    if samples := _samples(stages):
        parts.append(Section("Samples side by side", "\n\n".join([*samples, SAMPLES])))
    if results.get("ablation"):
        parts.append(Section("Is it the linear part?", ABLATION, _ablation(results["ablation"])))
    missed = {str(curve["layer"]): curve for curve in results["transfer"]}
    degrees = {str(row["layer"]): row["degrees"] for row in (results.get("degrees") or {}).get("layers") or []}
    layers = [
        {"layer": name, "attention": plan_words(plan), "missed before transfer": missed.get(name, {}).get("before"),
         "missed after transfer": missed.get(name, {}).get("after"),
         "degrees of freedom": degrees.get(name) and mean(degrees[name]),
         "of the widest head": degrees.get(name) and max(degrees[name])}
        for name, plan in results["plan"]["layers"].items()
    ]  # fmt: skip
    return [*parts, Section("Layer by layer", LAYERS, pandas.DataFrame(layers).dropna(axis="columns", how="all"))]


def lead(results: Row) -> str:
    """In a few sentences: how much was converted, what was kept and what was lost."""
    meta, stages = results["meta"], results.get("stages") or []
    words = [f"{meta['converted']:,} attention layers were converted."]
    if tokens := meta.get("training_tokens"):
        words.append(f"{tokens:,} tokens were read in training, repeats counted.")
    first, last = (stages[0], stages[-1]) if len(stages) > 1 else ({}, {})
    for teacher, other in zip(first.get("perplexity") or [], last.get("perplexity") or [], strict=False):
        a, b = teacher["perplexity"], other["perplexity"]
        change = f"({100 * (b / a - 1):+.1f} %)"
        words.append(f"Perplexity at {other['length']:,} tokens went from {a:.2f} to {b:.2f} {change}.")
    if last.get("agreement"):
        words.append(f"Sentence vectors have a mean cosine of {last['agreement']['mean']:.4f} to the teacher's.")
    return " ".join(words)


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


def _samples(stages: Sequence[Row]) -> list[str]:
    """What the teacher and the last stage write after the same prompts."""
    writing = [stage for stage in stages if stage.get("samples")]
    ends, lines = writing[:1] + writing[1:][-1:], []
    for number, sample in enumerate(writing[0]["samples"] if writing else ()):
        lines += [f"{sample['prompt']} …", *(f"{end['name']}: {end['samples'][number]['text']}" for end in ends)]
    return lines


def _charts(results: Row, stages: Sequence[Row]) -> list[Section]:
    """Quality and the cost of decoding by length, and how layers learned."""

    def lines(field: str, x: str, y: str, haystack: str | None = None) -> Curves:
        return {each["name"]: [(row[x], row[y]) for row in each.get(field) or [] if row.get("haystack") == haystack]
                for each in stages}  # fmt: skip

    haystacks = dict.fromkeys(row["haystack"] for stage in stages for row in stage.get("needle_by_length") or [])

    learned = [row for row in results["transfer"] if len(row["losses"]) > 1]
    losses: Curves = {}
    for row in learned[:: max(1, len(learned) // 4)]:
        steps = range(0, len(row["losses"]), max(1, len(row["losses"]) // 60))
        losses[f"layer {row['layer']}"] = [(step, row["losses"][step]) for step in steps]
    drawn = ("Loss of some layers", "step", losses, {"log": 10})
    return chart(
        "quality", "Quality by length", QUALITY,
        ("Perplexity", "tokens of a window", lines("perplexity", "length", "perplexity"), {}),
        *((f"Needles found in {name}", "tokens of the text", lines("needle_by_length", "length", "found", name),
           {"limits": (-0.04, 1.04)}) for name in haystacks),
    ) + chart(
        "cost", "Memory and speed of decoding", COST,
        ("Cache of one sequence", "tokens before", lines("decoding", "context", "cache_bytes"),
         {"shown": binary, "log": 2}),
        ("Decoded tokens per second", "tokens before", lines("decoding", "context", "tokens_per_second"), {}),
    ) + chart("transfer", "How layers learned", TRANSFER, drawn)  # fmt: skip
