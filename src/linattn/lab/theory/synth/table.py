"""A table like the paper's: a row per mechanism, positions and Canon layers, a column per width."""

from statistics import mean
from typing import Any

from rich.table import Table


def paper_table(results: dict[str, Any], metrics: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows with ``mechanism``, ``positions``, ``canon``, and ``scores`` by width: means over seeds of each metric.

    ``gain`` holds, by width, what Canon layers add to the first metric; None in rows without Canon layers.
    """
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for entry in results["mechanisms"]:
        key = (entry["pattern"], entry["position"], entry["canon"] or "none")
        row = rows.setdefault(key, dict(zip(("mechanism", "positions", "canon"), key, strict=True)) | {"scores": {}})
        row["scores"][str(entry["width"])] = _means(results, entry, metrics)
    for (pattern, position, canon), row in rows.items():
        plain = rows.get((pattern, position, "none"))
        row["gain"] = None
        if canon != "none" and plain is not None:
            row["gain"] = {width: _difference(found, plain["scores"].get(width, {}), metrics[0])
                           for width, found in row["scores"].items()}  # fmt: skip
    return list(rows.values())


def _means(results: dict[str, Any], entry: dict[str, Any], metrics: tuple[str, ...]) -> dict[str, float | None]:
    runs = [row["epochs"][-1]["metrics"] for row in results["rows"]
            if row["mechanism"] == entry["mechanism"] and row["epochs"]]  # fmt: skip
    found: dict[str, float | None] = {}
    for metric in metrics:
        values = [run[metric] for run in runs if metric in run]
        found[metric] = mean(values) if values else None
    if "bits" in found and found["bits"] is not None and entry.get("parameters"):
        found["bits_per_parameter"] = found["bits"] / entry["parameters"]
    if entry.get("written") is not None:
        found["written"] = entry["written"]
    return found


def _difference(one: dict[str, Any], other: dict[str, Any], metric: str) -> float | None:
    pair = one.get(metric), other.get(metric)
    return None if None in pair else pair[0] - pair[1]  # type: ignore[operator]


def on_screen(rows: list[dict[str, Any]]) -> Table:
    """The table with widths below each other: side by side they would not fit a screen."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    metrics = list(dict.fromkeys(metric for row in rows for found in row["scores"].values() for metric in found))
    for title in ("mechanism", "positions", "canon"):
        table.add_column(title, no_wrap=True)
    for title in ("width", *metrics, "canon adds"):
        table.add_column(title.replace("_", " "), justify="right")
    for row in rows:
        for width, found in row["scores"].items():
            cells = [_number(found.get(metric)) for metric in metrics]
            gain = _number((row["gain"] or {}).get(width), "+")
            table.add_row(row["mechanism"], row["positions"], row["canon"], width, *cells, gain)
    return table


def _number(value: float | None, sign: str = "") -> str:
    if value is None:
        return ""
    return format(value, f"{sign}.1f" if abs(value) >= 10 else f"{sign}.3g")
