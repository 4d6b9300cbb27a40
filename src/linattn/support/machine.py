"""What results depend on beside their settings: the machine, the version of the code; and the processes on it."""

import os
import platform
import shlex
import sys
import threading
import time
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from linattn._version import __version__

PACKAGE = Path(__file__).parents[1]
SECONDS_BETWEEN_LOOKS = 0.2


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


def source_digest(folder: Path = PACKAGE) -> str:
    """Digest of all Python files in the folder, as the code also changes between releases with the same version."""
    digest = sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def end_with_parent(parent: int | None = None) -> None:
    """Let this process end when the process that started it is gone.

    Otherwise a worker whose parent was killed would go on beside the next one that the user starts. ``parent``: its id
    as it knows it itself; a process that was killed while its child imported modules is the parent no more.
    """
    started_by = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == started_by:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
