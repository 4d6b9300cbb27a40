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


def _charts(results: Row, stages: Sequence[Row]) -> list[Section]:
    """The cost of decoding by length, and how layers learned."""

    def decoding(figure: str) -> Curves:
        return {each["name"]: [(row["context"], row[figure]) for row in each.get("decoding") or []] for each in stages}

    learned = [row for row in results["transfer"] if len(row["losses"]) > 1]
    losses: Curves = {}
    for row in learned[:: max(1, len(learned) // 4)]:
        steps = range(0, len(row["losses"]), max(1, len(row["losses"]) // 60))
        losses[f"layer {row['layer']}"] = [(step, row["losses"][step]) for step in steps]
    drawn = ("Loss of some layers", "step", losses, {"log": 10})
    return chart(
        "cost", "Memory and speed of decoding", COST,
        ("Cache of one sequence", "tokens before", decoding("cache_bytes"), {"shown": binary, "log": 2}),
        ("Decoded tokens per second", "tokens before", decoding("tokens_per_second"), {}),
    ) + chart("transfer", "How layers learned", TRANSFER, drawn)  # fmt: skip
