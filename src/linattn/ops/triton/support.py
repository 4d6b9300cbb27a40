"""What all kernels share on the host: whether they can run here and why not, widths, codes, the size of the device."""

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

# How kernels are told the normaliser.
NORM_CODES = {None: 0, "sum": 1, "abs_max_one": 2}
# Oldest release that the kernels were proved with.
OLDEST = (3, 6)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _triton_version() -> tuple[int, ...] | None:
    """``(3, 6)``, or None where Triton is not installed; Triton itself is not imported for it."""
    try:
        return tuple(int(part) for part in version("triton").split("+")[0].split(".")[:2])
    except PackageNotFoundError:
        return None


# A constant: torch.compile would have to look into a function that keeps its result.
TRITON = _triton_version()


def reason_against(*tensors: Tensor) -> str:
    """Why kernels cannot serve these tensors, in words; empty if they can."""
    if TRITON is None:
        return "Triton is not installed"
    if TRITON < OLDEST:
        return f"Triton {'.'.join(map(str, TRITON))} is older than {'.'.join(map(str, OLDEST))}"
    device = tensors[0].device
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return f"the tensors are on {device.type}, kernels need cuda"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than Ampere"
    dtypes = {t.dtype for t in tensors}
    if not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        return f"kernels take float32, bfloat16 and float16, got {', '.join(sorted(map(str, dtypes)))}"
    return ""


def padded(width: int) -> int:
    """The power of two that holds it; an operand of a matrix product has at least 16 columns."""
    return max(16, 1 << (width - 1).bit_length())


@cache
def multiprocessors(device: torch.device) -> int:
    """Of the GPU; 2 for the interpreter, so that long sequences are cut there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
