"""Describes the machine on which numbers were measured."""

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from typing import Any

import torch

from linattn._version import __version__


def describe_run(device: torch.device, command: list[str] | None = None) -> dict[str, Any]:
    """The ``meta`` of every result: device, versions, command and date; callers add their seeds and settings."""
    command = ["linattn", *sys.argv[1:]] if command is None else command
    return {
        "device": device_name(device),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "versions": {"linattn": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "command": shlex.join(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def device_folder(device: torch.device) -> str:
    """Name of the folder for a device's results: ``cpu``, or the name of the GPU such as ``h200``."""
    if device.type != "cuda":
        return "cpu"
    return device_name(device).lower().removeprefix("nvidia ").replace(" ", "-")


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
