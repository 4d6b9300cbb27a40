"""Tables of `linattn models`: whole models for the README, and every vision preset for the page of backbones."""

import json
from pathlib import Path
from typing import Any

from readme_parts import chart_line, three_digits

from linattn.lab.bench.hosts import backbone_case

SOFTMAX = "softmax"


def models_text(path: Path) -> str:
    """Models down; for each mode the time and how it compares with softmax, then memory and where the map is."""
    result = json.loads(path.read_text())
    meta, rows = result["meta"], result["rows"]
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
    lines += ["", *_beaten(rows), _checked(rows), ""]
    return "\n".join(lines)


def backbones_text(path: Path) -> str:
    """Models down, sizes of images across, of the mode that was measured."""
    result = json.loads(path.read_text())
    meta, rows = result["meta"], result["rows"]
    lines = [
        f"{meta['device']}, torch {meta['versions']['torch']}, Triton {meta['versions']['triton']}, "
        f"{meta['date'][:10]}: `{meta['command']}`.",
        "",
        backbones_table(rows, rows[0]["mode"] if rows else ""),
        _checked(rows),
    ]
    return "\n".join([*lines, *chart_line(path, "time and memory over softmax"), ""])


def _time_cells(row: dict[str, Any] | None) -> list[str]:
    if row is None or row.get("median_ms") is None:
        return ["" if row is None else row["status"], ""]
    over = "" if row["mechanism"] == SOFTMAX or row.get("over_softmax") is None else f"{row['over_softmax']:.2f}"
    status = "" if row["status"] == "ok" else f" ({row['status']})"
    return [three_digits(row["median_ms"]) + status, over]


def _other_cells(rows: dict[str, dict[str, Any]]) -> list[str]:
    timed = [row for row in rows.values() if row.get("median_ms") is not None]
    if not timed:
        return ["", "", ""]
    best = min(timed, key=lambda row: row["median_ms"])
    peak = next((row["peak_bytes"] for row in timed if row.get("peak_bytes")), None)
    where = next((row["feature_map"] for row in timed if row.get("feature_map")), "")
    size = "" if peak is None else f"{peak / 2**30:.1f}"
    return [f"{best['per_second']:,.0f} {best['unit']}", size, where]


def _beaten(rows: list[dict[str, Any]]) -> list[str]:
    """Which do not beat softmax, and by how much."""
    measured = [row for row in rows if row["mechanism"] != SOFTMAX and row.get("over_softmax") is not None]
    if not measured:
        return []
    slower = [row for row in measured if row["over_softmax"] >= 1 or row["status"] != "ok"]
    text = f"{len(measured) - len(slower)} of {len(measured)} beat the same model on softmax."
    if slower:
        texts = [f"`{r['mechanism']}` in {r['case']}, {r['mode']}: {r['over_softmax']:.2f} of its time" for r in slower]
        text += f" Not: {'; '.join(texts)}."
    return [text, ""]


def _checked(rows: list[dict[str, Any]]) -> str:
    checked = [row for row in rows if row.get("error") is not None]
    worst = max((row["error"] / row["budget"] for row in checked if row["status"] != "WRONG"), default=0)
    wrong = [f"{row['mechanism']} in {row['case']}, {row['mode']}" for row in rows if row["status"] == "WRONG"]
    others = [row for row in rows if row.get("on_kernels") is not None]
    served = sum(row["on_kernels"] for row in others)
    said = f" Wrong: {', '.join(wrong)}." if wrong else ""
    return (
        f"Loss and gradients of {len(checked)} rows were checked against plain PyTorch in the same run and used at "
        f"most {worst:.0%} of their error budget; in {served} of {len(others)} rows of linear attention every call "
        f"took kernels.{said}"
    )


def backbones_table(rows: list[dict[str, Any]], mode: str) -> str:
    """Models as rows, sizes as columns; a cell has images per second and peak GiB, each also relative to softmax.

    Parameters are counted at the smallest images, as learned positions grow with the plane.
    """
    softmax = {row["case"]: row for row in rows if (row["mechanism"], row["mode"]) == (SOFTMAX, mode)}
    cells: dict[tuple[str, str], dict[int, str]] = {}
    parameters: dict[tuple[str, str], dict[int, int]] = {}
    for row in rows:
        case = backbone_case(row["case"])
        if case is None or row["mode"] != mode or row["mechanism"] == SOFTMAX:
            continue
        key = (case.size, row["mechanism"])
        cells.setdefault(key, {})[case.pixels] = _backbone_cell(row, softmax.get(row["case"], {}))
        if row.get("parameters") is not None:
            parameters.setdefault(key, {})[case.pixels] = row["parameters"]
    sizes = sorted({pixels for own in cells.values() for pixels in own})
    lines = ["| " + " | ".join(["model", "mechanism", "parameters", *map(str, sizes)]) + " |"]
    lines.append("|---|---|---:|" + "---:|" * len(sizes))
    for key, own in cells.items():
        counts = parameters.get(key)
        count = f"{counts[min(counts)] / 1e6:.1f} M" if counts else ""
        names = [f"`{name}`" for name in key]
        lines.append("| " + " | ".join([*names, count, *(own.get(pixels, "") for pixels in sizes)]) + " |")
    return "\n".join(lines) + "\n"


def _backbone_cell(row: dict[str, Any], softmax: dict[str, Any]) -> str:
    """``1,240/s (1.30x), 2.1 GiB (0.52x)``, or why there are no such numbers."""
    if row["status"] != "ok" or row.get("per_second") is None:
        return str(row["status"])
    speed = softmax["median_ms"] / row["median_ms"] if softmax.get("median_ms") else None
    memory = row["peak_bytes"] / softmax["peak_bytes"] if row.get("peak_bytes") and softmax.get("peak_bytes") else None
    text = f"{row['per_second']:,.0f}/s{_times(speed)}"
    text += f", {row['peak_bytes'] / 2**30:.1f} GiB{_times(memory)}" if row.get("peak_bytes") else ""
    return text + (f"; softmax: {softmax['status']}" if softmax.get("status", "ok") != "ok" else "")


def _times(share: float | None) -> str:
    return "" if share is None else f" ({share:.2f}x)"
