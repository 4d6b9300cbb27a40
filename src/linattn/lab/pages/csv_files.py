"""Results as CSV: ``results.csv`` with one line per mechanism, ``runs.csv`` with one line per run."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from linattn.lab.pages.read import Comparison
from linattn.support.files import write_atomically

MEASURED = (
    "lr",
    "parameters",
    "mechanism_parameters",
    "flops",
    "attention_flops",
    "state_size",
    "images_per_second_forward",
    "images_per_second_train",
    "peak_bytes_train",
    "train_seconds_mean",
    "entropy",
    "entropy_gap",
)
OF_CONVERSION = ("top1_before_mean", "top1_converted_mean")
OF_TEXT = (
    "pattern",
    "canon",
    "width",
    "lr",
    "lr_edge",
    "parameters",
    "mechanism_parameters",
    "state_bytes",
    "tokens_per_second_forward",
    "tokens_per_second_train",
    "peak_bytes_train",
    "train_seconds_mean",
)


def write_csv(results: Mapping[str, Any], path: Path) -> list[Path]:
    """Write the mechanisms to ``path`` and the runs to ``runs.csv`` beside it; what was not measured stays empty."""
    comparison = Comparison(results)
    field = comparison.metric.field
    measured: tuple[str, ...] = MEASURED if comparison.words.unit == "images" else OF_TEXT
    if any(comparison.value(name, OF_CONVERSION[0]) is not None for name in comparison.names):
        measured = OF_CONVERSION + measured
    if any(comparison.options(name) for name in comparison.names):
        measured = ("options", *measured)
    of_run = ("mechanism", "seed", "lr", "status", field, "train_seconds", "reason")
    mechanisms = [_mechanism(comparison, name, measured) for name in comparison.names]
    runs = [{column: row.get(column) for column in of_run} for row in comparison.rows]
    runs_path = path.with_name("runs.csv")
    accuracy = (*(f"{field}_{part}" for part in ("mean", "std", "min", "max")), "runs")
    _write(path, ("mechanism", *accuracy, *measured), mechanisms)
    _write(runs_path, of_run, runs)
    return [path, runs_path]


def _mechanism(comparison: Comparison, name: str, measured: Sequence[str]) -> dict[str, Any]:
    accuracy = comparison.accuracy(name)
    line: dict[str, Any] = {"mechanism": name, "runs": 0}
    if accuracy is not None:
        parts = {"mean": "mean", "std": "std", "low": "min", "high": "max"}
        field = comparison.metric.field
        line |= {f"{field}_{parts[part]}" if part in parts else part: value for part, value in asdict(accuracy).items()}
    found = {column: comparison.entry(name).get(column) for column in measured}
    return line | found | ({"options": comparison.options(name)} if "options" in found else {})


def _write(path: Path, header: Sequence[str], lines: list[dict[str, Any]]) -> None:
    def fill(temporary: Path) -> None:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, header, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)

    write_atomically(path, fill)
