"""The part of the README that shows results of `linattn compare`: on images, and on text and tasks of sequences."""

import json
from pathlib import Path
from typing import Any

from linattn.lab.pages.metric import Metric, Words
from linattn.lab.pages.summary import edge_sentence, ranking_sentence

ARROWS = {"highest": " ↑", "lowest": " ↓", None: ""}  # beside a learning rate at the edge of those tried


def comparison_text(path: Path) -> str:
    """The metric with its spread, and what it costs where that was measured."""
    result = json.loads(path.read_text())
    meta = result["meta"]
    table = [_columns(row, meta) for row in result["mechanisms"]]
    names = [name for name in table[0] if any(row[name] for row in table)]
    lines = [
        on_sequences(meta) if meta.get("kind") == "text" else _on_images(meta),
        f"{meta['device']}, torch {meta['versions']['torch']}, {meta['date'][:10]}: `{meta['command']}`.",
        *([meta["remark"]] if "remark" in meta else []),
        "",
        "| " + " | ".join(names) + " |",
        "|---" + "|---:" * (len(names) - 1) + "|",
        *("| " + " | ".join(row[name] for name in names) + " |" for row in table),
    ]
    said = filter(None, (ranking_sentence(result), edge_sentence(result)))
    return "\n".join([*lines, "", *said, ""])


def _on_images(meta: dict[str, Any]) -> str:
    host, data, train = meta["host"], meta["data"], meta["train"]
    tokens, width, depth = (_listed(host[name]) for name in ("tokens", "width", "depth"))
    after = train.get("epochs_after_conversion")
    epochs = f"{train['epochs']} epochs" + (f" on softmax, converted, {after} more" if after else "")
    return (
        f"**{data['name']}**, {data['train']:,} training and {data['test']:,} test images, {tokens} tokens, "
        f"width {width}, depth {depth}, {epochs}, {len(meta['seeds'])} seeds."
    )


def _listed(value: Any) -> str:
    """A pyramid has a number a stage."""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def on_sequences(meta: dict[str, Any]) -> str:
    """The task with its file, if it has one, the host, the budget, and how learning rates came about."""
    host, data, train = meta["host"], meta["data"], meta["train"]
    name = data["name"] if "data" not in data else f"{data['name']}, {Path(data['data']).name}"
    width = _listed(host["width"])
    equal = ", equal parameters" if host["equal_parameters"] else ""
    seeds, rates = len(meta["seeds"]), meta["lrs"]
    rate = f"learning rate {rates[0]:g}"
    if len(rates) > 1:
        rate = f"learning rate of each the best of {', '.join(f'{rate:g}' for rate in rates)} on held-out data"
    return (
        f"**{name}**, {host['tokens']:,} tokens a sequence, width {width}, depth {host['depth']}{equal}, "
        f"{train['steps']:,} steps of {train['batch_size']} sequences, {seeds} seed{'' if seeds == 1 else 's'}, {rate}."
    )


def _with_spread(row: dict[str, Any], field: str, number: str) -> str:
    """Of a conversion; empty where there was none."""
    mean, std = row.get(f"{field}_mean"), row.get(f"{field}_std")
    return "" if mean is None else number.format(mean) + ("" if std is None else f" ± {number.format(std)}")


def _columns(row: dict[str, Any], meta: dict[str, Any]) -> dict[str, str]:
    """Each cell by the name of its column; empty where nothing was measured."""
    metric, words = Metric.of(meta), Words.of(meta)
    number, unit = f"{{:.{metric.decimals}f}}", metric.unit if "metric" in meta else ""

    def cell(field: str, form: str, size: float = 1) -> str:
        return "" if row.get(field) is None else form.format(row[field] / size)

    least, greatest = cell(f"{metric.field}_min", number), cell(f"{metric.field}_max", number)
    rate = cell("lr", "{:g}") + ARROWS[row.get("lr_edge")] if len(meta.get("lrs", ())) > 1 else ""
    return {
        "mechanism": f"`{row['mechanism']}`",
        "before": _with_spread(row, f"{metric.field}_before", number),
        "right after": _with_spread(row, f"{metric.field}_converted", number),
        f"{metric.name}{f' ({unit})' if unit else ''}, mean ± std": cell(f"{metric.field}_mean", number)
        + cell(f"{metric.field}_std", f" ± {number}"),
        "least to greatest": f"{least} to {greatest}" if row.get(f"{metric.field}_std") is not None else "",
        "learning rate": rate if meta.get("kind") == "text" else "",
        "parameters": cell("parameters", "{:,.0f}"),
        "state": cell("state_bytes", "{:,.1f} KiB", 2**10),
        f"{words.unit}/s forward": cell(words.speed(training=False), "{:,.0f}"),
        f"{words.unit}/s training": cell(words.speed(training=True), "{:,.0f}"),
        "peak memory": cell("peak_bytes_train", "{:,.0f} MiB", 2**20),
        "entropy gap": cell("entropy_gap", "{:+.2f}"),
        "seconds a run": cell("train_seconds_mean", "{:,.0f}") if meta.get("kind") == "text" else "",
    }
