"""What all kernels share on the host: whether and why not they can run, widths, codes, the size of the device."""

import os
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# The codes of normalisers in kernels.
NORM_CODES = {None: 0, "sum": 1, "abs_max_one": 2}
# The codes of feature maps in kernels, by the names of twins; each is a branch of the device functions in kernels.maps.
MAP_CODES = {
    "identity": 0, "relu": 1, "elu": 2, "pair_relu": 3, "split_power": 4, "norm_power": 5, "split_expm1": 6,
    "squares": 7, "softmax_pair": 8, "shifted_power": 9, "sign_power": 10, "squares_and_linear": 11,
    "unit_silu": 12,
}  # fmt: skip
# The environment variable that turns kernels off for impl="auto" when it is 0; impl="triton" still takes them.
SWITCH = "LINATTN_TRITON"

Answer = TypeVar("Answer", bound=Callable[..., object])

Version = tuple[int, ...]
ANY: Version = (99, 99)


class Miscompiled(NamedTuple):
    """Ranges of Triton releases and of compute capabilities that do not go together; upper bounds are excluded."""

    triton: tuple[Version, Version]
    capability: tuple[Version, Version]
    reason: str


# Searched from the top: the first that matches gives the reason.
MISCOMPILED = (
    Miscompiled(((0, 0), (3, 6)), ((0, 0), ANY), "the kernels were proved from Triton 3.6 on"),
    Miscompiled(((0, 0), ANY), ((0, 0), (8, 0)), "kernels need an Ampere GPU (compute capability 8.0) or newer"),
    Miscompiled(
        ((3, 7), (3, 8)),
        ((9, 0), (10, 0)),
        "on Hopper this release reads outside of shared memory in products of 32 columns (Triton's issue 11366)",
    ),
)


def assume_constant(function: Answer) -> Answer:
    """``torch.compiler.assume_constant_result`` without importing the compiler, which takes seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors: slow, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@assume_constant
def switched_off() -> bool:
    """Whether the environment keeps ``auto`` from taking kernels."""
    return os.environ.get(SWITCH, "1") == "0"


def _triton_version() -> Version | None:
    """The version of Triton, such as ``(3, 6)``, or None if it is not installed; Triton itself is not imported."""
    try:
        return tuple(int(part) for part in version("triton").split("+")[0].split(".")[:2])
    except PackageNotFoundError:
        return None


# A constant, as torch.compile would trace into a cached function.
TRITON = _triton_version()


def reason_against_compiler(triton: Version | None, capability: Version | None) -> str:
    """Why this release of Triton compiles no kernels for this GPU (None: the interpreter); empty if it does."""
    if triton is None:
        return "Triton is not installed"
    # The interpreter compiles nothing; it must only be new enough for the language of the kernels.
    gpu = (98, 0) if capability is None else capability
    for known in MISCOMPILED:
        (since, until), (oldest, newest) = known.triton, known.capability
        if since <= triton < until and oldest <= gpu < newest:
            where = "" if capability is None else f" for compute capability {'.'.join(map(str, capability))}"
            return f"Triton {'.'.join(map(str, triton))}{where} is refused: {known.reason}"
    return ""


def reason_against(*tensors: Tensor) -> str:
    """Why kernels cannot serve these tensors, in words; empty if they can."""
    reason = _reason_against_device(tensors[0].device)
    if reason:
        return reason
    dtypes = {t.dtype for t in tensors}
    if not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        return f"kernels take float32, bfloat16 and float16, got {', '.join(sorted(map(str, dtypes)))}"
    return ""


@assume_constant
def _reason_against_device(device: torch.device) -> str:
    """Why kernels cannot run on the device; a constant for torch.compile, which cannot trace calls of the driver."""
    on_cpu = device.type == "cpu" and interpreted()
    if device.type != "cuda" and not on_cpu:
        return f"the tensors are on {device.type}, kernels need cuda"
    return reason_against_compiler(TRITON, None if on_cpu else torch.cuda.get_device_capability(device))


def padded(width: int) -> int:
    """The smallest power of two >= width and >= 16, the fewest columns of an operand of a matrix product."""
    return max(16, 1 << (width - 1).bit_length())


def known_stride(x: Tensor) -> int:
    """The stride from token to token as a constant for the compiler; 0 if it could change with T."""
    return x.stride(2) if x.stride(3) == 1 and x.itemsize == 2 else 0


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of the GPU; 2 for the interpreter, so that long sequences are cut there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
