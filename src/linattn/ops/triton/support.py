"""What all kernels share on the host: whether they can run here and why not, widths, codes, the size of the device."""

import os
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# How kernels are told the normaliser.
NORM_CODES = {None: 0, "sum": 1, "abs_max_one": 2}
# How kernels are told the feature map: the names of twins, each a branch of the device functions in kernels.maps.
MAP_CODES = {
    "identity": 0, "relu": 1, "elu": 2, "pair_relu": 3, "split_power": 4, "norm_power": 5, "split_expm1": 6,
    "squares": 7, "softmax_pair": 8, "shifted_power": 9, "sign_power": 10, "squares_and_linear": 11,
    "unit_silu": 12,
}  # fmt: skip
# Turns kernels off for impl="auto" when it is 0; a named impl="triton" is still taken.
SWITCH = "LINATTN_TRITON"

Answer = TypeVar("Answer", bound=Callable[..., object])

Version = tuple[int, ...]
ANY: Version = (99, 99)


class Miscompiled(NamedTuple):
    """Releases of Triton and GPUs (compute capability) known to go wrong together; bounds: from, up to but without."""

    triton: tuple[Version, Version]
    capability: tuple[Version, Version]
    reason: str


# Looked through from the top: the first that fits is the reason given.
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
    """``torch.compiler.assume_constant_result`` without its import of the compiler, which takes seconds."""
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
    """``(3, 6)``, or None where Triton is not installed; Triton itself is not imported for it."""
    try:
        return tuple(int(part) for part in version("triton").split("+")[0].split(".")[:2])
    except PackageNotFoundError:
        return None


# A constant: torch.compile would have to look into a function that keeps its result.
TRITON = _triton_version()


def reason_against_compiler(triton: Version | None, capability: Version | None) -> str:
    """Why no kernel is compiled by this release for this GPU (None: the interpreter's); empty if they are."""
    if triton is None:
        return "Triton is not installed"
    # The interpreter compiles nothing; it must only be new enough to know what the kernels are written in.
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
    """Asked once per compiled graph: torch.compile cannot look into the driver's answers."""
    on_cpu = device.type == "cpu" and interpreted()
    if device.type != "cuda" and not on_cpu:
        return f"the tensors are on {device.type}, kernels need cuda"
    return reason_against_compiler(TRITON, None if on_cpu else torch.cuda.get_device_capability(device))


def padded(width: int) -> int:
    """The power of two that holds it; an operand of a matrix product has at least 16 columns."""
    return max(16, 1 << (width - 1).bit_length())


def known_stride(x: Tensor) -> int:
    """Numbers from token to token, for the compiler to count with; 0 where that could change with T."""
    return x.stride(2) if x.stride(3) == 1 and x.itemsize == 2 else 0


@cache
def multiprocessors(device: torch.device) -> int:
    """Of the GPU; 2 for the interpreter, so that long sequences are cut there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
