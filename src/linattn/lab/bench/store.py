"""The file of a benchmark's result."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from linattn.lab.bench.rows import Result
from linattn.lab.bench.settings import BenchConfig
from linattn.support import machine
from linattn.support.files import write_json


def save_result(result: Result, path: Path) -> None:
    write_json(path, result.as_json())


def describe_run(config: BenchConfig, command: list[str] | None = None) -> dict[str, Any]:
    """The ``meta`` of a result: device, versions, command, date, seed and settings."""
    return machine.describe_run(config.torch_device, command) | {"seed": config.seed, "settings": asdict(config)}
