"""Tables of `linattn models`: whole models for the README, and every vision preset for the page of backbones."""

import json
from pathlib import Path
from typing import Any

from readme_parts import chart_line, three_digits

from linattn.lab.bench.models.rows import ModelsResult
from linattn.lab.bench.models.table import backbones_table

SOFTMAX = "softmax"


def models_text(path: Path) -> str:
    """Models down; for each mode the time and how it compares with softmax, then memory and where the map is."""
    result = json.loads(path.read_text())
    meta, rows, goals = result["meta"], result["rows"], result["goals"]
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    head = " | ".join(f"{mode}, ms | of softmax" for mode in modes)
    lines = [
        f"**Whole models**, {meta['precision']}: forward, loss and backward of one step, compiled by `torch.compile`; "
        "softmax is PyTorch's flash kernel.",
        f"{meta['device']}, torch {meta['versions']['torch']}, Triton {meta['versions']['triton']}, "
        f"{meta['date'][:10]}: `{meta['command']}`.",
        "",
        f"| model | mechanism | {head} | per second | peak GiB | feature map |",
        "|---|---|" + "---:|" * (2 * len(modes) + 2) + "---|",
    ]
    shapes = {row["case"]: row["shape"] for row in rows}
    for case, mechanism in dict.fromkeys((row["case"], row["mechanism"]) for row in rows):
        own = {row["mode"]: row for row in rows if (row["case"], row["mechanism"]) == (case, mechanism)}
        cells = [cell for mode in modes for cell in _time_cells(own.get(mode))]
        lines.append(f"| {shapes[case]} | `{mechanism}` | " + " | ".join([*cells, *_other_cells(own)]) + " |")
    lines += ["", *_beaten(goals), _checked(rows), ""]
    return "\n".join(lines)


def backbones_text(path: Path) -> str:
    """Models down, sizes of images across, of the mode that was measured."""
    result = json.loads(path.read_text())
    meta, rows = result["meta"], result["rows"]
    lines = [
        f"{meta['device']}, torch {meta['versions']['torch']}, Triton {meta['versions']['triton']}, "
        f"{meta['date'][:10]}: `{meta['command']}`.",
        "",
        backbones_table(ModelsResult.from_json(result), rows[0]["mode"] if rows else ""),
        _checked(rows),
    ]
    return "\n".join([*lines, *chart_line(path, "time and memory over softmax"), ""])


def _time_cells(row: dict[str, Any] | None) -> list[str]:
    if row is None or row["median_ms"] is None:
        return ["" if row is None else row["status"], ""]
    over = "" if row["mechanism"] == SOFTMAX or row["over_softmax"] is None else f"{row['over_softmax']:.2f}"
    status = "" if row["status"] == "ok" else f" ({row['status']})"
    return [three_digits(row["median_ms"]) + status, over]


def _other_cells(rows: dict[str, dict[str, Any]]) -> list[str]:
    timed = [row for row in rows.values() if row["median_ms"] is not None]
    if not timed:
        return ["", "", ""]
    best = min(timed, key=lambda row: row["median_ms"])
    peak = next((row["peak_bytes"] for row in timed if row["peak_bytes"]), None)
    where = next((row["feature_map"] for row in timed if row["profile"] is not None), "")
    size = "" if peak is None else f"{peak / 2**30:.1f}"
    return [f"{best['per_second']:,.0f} {best['unit']}", size, where]


def _beaten(goals: list[dict[str, Any]]) -> list[str]:
    """Which do not beat softmax, and by how much."""
    measured = [goal for goal in goals if goal["reached"] is not None]
    if not measured:
        return []
    slower = [g for g in measured if not g["reached"]]
    text = f"{len(measured) - len(slower)} of {len(measured)} beat the same model on softmax."
    if slower:
        texts = [f"`{g['mechanism']}` in {g['case']}, {g['mode']}: {g['value']:.2f} of its time" for g in slower]
        text += f" Not: {'; '.join(texts)}."
    return [text, ""]


def _checked(rows: list[dict[str, Any]]) -> str:
    checked = [row for row in rows if row["error"] is not None]
    worst = max((row["error"] / row["budget"] for row in checked if row["status"] != "WRONG"), default=0)
    wrong = [f"{row['mechanism']} in {row['case']}, {row['mode']}" for row in rows if row["status"] == "WRONG"]
    others = [row for row in rows if row["on_kernels"] is not None]
    served = sum(row["on_kernels"] for row in others)
    again = any(row.get("checked_run") not in (None, row.get("run")) for row in checked)
    when = "by the same code in the same run or an earlier one" if again else "in the same run"
    said = f" Wrong: {', '.join(wrong)}." if wrong else ""
    return (
        f"Loss and gradients of {len(checked)} rows were checked against plain PyTorch {when} and used at "
        f"most {worst:.0%} of their error budget; in {served} of {len(others)} rows of linear attention every call "
        f"took kernels.{said}"
    )
