"""The part of the README that shows results of `linattn compare` on images."""

import json
from pathlib import Path
from typing import Any

from linattn.report.summary import ranking_sentence


def comparison_text(path: Path) -> str:
    """Accuracy with its spread, and what it costs where that was measured."""
    result = json.loads(path.read_text())
    meta = result["meta"]
    host, data, seeds = meta["host"], meta["data"], len(meta["seeds"])
    table = [_columns(row) for row in result["mechanisms"]]
    names = [name for name in table[0] if any(row[name] for row in table)]
    lines = [
        f"**{data['name']}**, {data['train']:,} training and {data['test']:,} test images, {host['tokens']} tokens, "
        f"width {host['width']}, depth {host['depth']}, {meta['train']['epochs']} epochs, {seeds} seeds.",
        f"{meta['device']}, torch {meta['versions']['torch']}, {meta['date'][:10]}: `{meta['command']}`.",
        *([meta["remark"]] if "remark" in meta else []),
        "",
        "| " + " | ".join(names) + " |",
        "|---" + "|---:" * (len(names) - 1) + "|",
        *("| " + " | ".join(row[name] for name in names) + " |" for row in table),
    ]
    return "\n".join([*lines, "", ranking_sentence(result), ""])


def _columns(row: dict[str, Any]) -> dict[str, str]:
    """Each cell by the name of its column; empty where nothing was measured."""

    def cell(field: str, form: str, unit: float = 1) -> str:
        return "" if row.get(field) is None else form.format(row[field] / unit)

    return {
        "mechanism": f"`{row['mechanism']}`",
        "top-1, mean ± std": cell("top1_mean", "{:.2f}") + cell("top1_std", " ± {:.2f}"),
        "least to greatest": f"{row['top1_min']:.2f} to {row['top1_max']:.2f}",
        "parameters": cell("parameters", "{:,.0f}"),
        "images/s forward": cell("images_per_second_forward", "{:,.0f}"),
        "images/s training": cell("images_per_second_train", "{:,.0f}"),
        "peak memory": cell("peak_bytes_train", "{:,.0f} MiB", 2**20),
        "entropy gap": cell("entropy_gap", "{:+.2f}"),
    }
