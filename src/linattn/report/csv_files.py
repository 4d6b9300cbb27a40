"""Results as CSV: ``results.csv`` with one line a mechanism, ``runs.csv`` with one line a run."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from linattn.report.read import Comparison
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
RUN = ("mechanism", "seed", "lr", "status", "top1", "train_seconds", "reason")


def write_csv(results: Mapping[str, Any], path: Path) -> list[Path]:
    """Write the mechanisms to ``path`` and the runs to ``runs.csv`` beside it; what was not measured stays empty."""
    comparison = Comparison(results)
    mechanisms = [_mechanism(comparison, name) for name in comparison.names]
    runs = [{field: row.get(field) for field in RUN} for row in comparison.rows]
    runs_path = path.with_name("runs.csv")
    accuracy = ("top1_mean", "top1_std", "top1_min", "top1_max", "runs")
    _write(path, ("mechanism", *accuracy, *MEASURED), mechanisms)
    _write(runs_path, RUN, runs)
    return [path, runs_path]


def _mechanism(comparison: Comparison, name: str) -> dict[str, Any]:
    accuracy = comparison.accuracy(name)
    line: dict[str, Any] = {"mechanism": name, "runs": 0}
    if accuracy is not None:
        names = {"mean": "top1_mean", "std": "top1_std", "low": "top1_min", "high": "top1_max", "runs": "runs"}
        line |= {names[field]: value for field, value in asdict(accuracy).items()}
    return line | {field: comparison.entry(name).get(field) for field in MEASURED}


def _write(path: Path, header: Sequence[str], lines: list[dict[str, Any]]) -> None:
    def fill(temporary: Path) -> None:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, header, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)

    write_atomically(path, fill)
