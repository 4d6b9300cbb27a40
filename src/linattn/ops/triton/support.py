"""Whether Triton kernels can run here, and why not."""

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

# Oldest release that the kernels were proved with.
OLDEST = (3, 6)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@cache
def triton_version() -> tuple[int, ...] | None:
    """``(3, 6)``, or None where Triton is not installed."""
    if find_spec("triton") is None:
        return None
    from importlib.metadata import version

    return tuple(int(part) for part in version("triton").split("+")[0].split(".")[:2])


def reason_against(*tensors: Tensor) -> str:
    """Why kernels cannot serve these tensors, in words; empty if they can."""
    version = triton_version()
    if version is None:
        return "Triton is not installed"
    if version < OLDEST:
        return f"Triton {'.'.join(map(str, version))} is older than {'.'.join(map(str, OLDEST))}"
    device = tensors[0].device
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return f"the tensors are on {device.type}, kernels need cuda"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than Ampere"
    dtypes = {t.dtype for t in tensors}
    if not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        return f"kernels take float32, bfloat16 and float16, got {', '.join(sorted(map(str, dtypes)))}"
    return ""
