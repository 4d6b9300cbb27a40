"""What happens in the process that measures a case: what cases share, and what cannot be measured."""

import gc
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import torch

from linattn.lab.bench.timing import TimeLimitError
from linattn.support.config import digest
from linattn.support.machine import PACKAGE, device_name, source_digest
from linattn.support.options import OptionError

Row = dict[str, Any]
Made = TypeVar("Made")
MEASURED_CODE = ("ops", "kernels", "mechanisms", "layers", "models")
BROKEN = 75  # exit code of a process whose GPU no longer responds


class Absent(Exception):  # noqa: N818, it is an answer and no error
    """Raised where a contender cannot serve the case; the message says why."""


def load() -> float:
    """How many processes wanted to run in the last minute, on average."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


@cache
def machine_of(place: torch.device) -> dict[str, Any]:
    """What speed depends on besides a case: another machine, other versions and other code are measured anew."""
    code = digest({name: source_digest(PACKAGE / name) for name in MEASURED_CODE})
    return {"device": device_name(place), "torch": torch.__version__, "threads": torch.get_num_threads(), "code": code}


def versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


_shared: dict[Hashable, Any] = {}


def shared(key: Hashable, make: Callable[[], Made]) -> Made:
    """What cases that follow one another have in common, made once; that of another key is freed before."""
    if key not in _shared:
        _shared.clear()
        clean()
        _shared[key] = make()
    return _shared[key]


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # so that no row meets memory fragmented by earlier ones


def guarded(case: Mapping[str, Any], row: Row, work: Callable[[], None]) -> Row:
    """Let ``work`` fill the row of a case; what cannot be measured becomes its status, and a failure is raised.

    With a GPU that no longer responds every further call would fail: the process ends, and others get a new one.
    """
    device = torch.device(case["settings"]["device"])
    torch.set_num_threads(case["on"]["threads"])
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            work()
    except OptionError:
        raise
    except Absent as reason:
        row |= {"status": "absent", "reason": one_line(reason)}
    except TimeLimitError as reason:
        row |= {"status": "left out", "reason": str(reason)}
    except Exception as error:
        if not (isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)):
            if device.type == "cuda" and not _alive(device):
                os._exit(BROKEN)
            raise RuntimeError(f"{type(error).__name__}: {one_line(error)}") from error
        row |= {"status": "out of memory", "reason": one_line(error).removeprefix("CUDA out of memory. ")}
    if row.get("status", "ok") != "ok":
        clean()  # only now: the error's traceback held every tensor
    return row


def _alive(device: torch.device) -> bool:
    try:
        torch.zeros(1, device=device).item()
    except Exception:
        return False
    return True


def one_line(text: object) -> str:
    return " ".join(str(text).split())[:240]
