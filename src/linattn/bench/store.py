"""Files of a run: written whole or not at all, and saying how their numbers were measured."""

import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import Any

import torch

from linattn._version import __version__
from linattn.bench.rows import Result
from linattn.bench.settings import BenchConfig


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then put it in its place in one step.

    Whatever happens on the way, ``path`` holds the old content or the new, and no temporary file stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Same folder, so that the replacement never crosses file systems; same suffix, as chart writers go by it.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner may read
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def save_result(result: Result, path: Path) -> None:
    # NaN is no JSON: a wrong row's error may be NaN, and readers in other languages would choke on it.
    text = dumps(_without_nan(result.as_json()), indent=1, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text))


def describe_run(config: BenchConfig, command: list[str] | None = None) -> dict[str, Any]:
    """The ``meta`` of a result: device, versions, command, date, seed and settings."""
    command = ["linattn", *sys.argv[1:]] if command is None else command
    return {
        "device": device_name(config.torch_device),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "versions": {"linattn": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "command": shlex.join(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": config.seed,
        "settings": asdict(config),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def device_folder(device: torch.device) -> str:
    """Folder of a device's results: ``cpu``, or the name of the GPU."""
    return device_name(device).lower().replace(" ", "-") if device.type == "cuda" else "cpu"


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value
