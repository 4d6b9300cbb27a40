"""Where a contract is held: on the CPU in fp64, where all forms agree to the last digits, and on a GPU by kernels."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

# Kernels take no fp64: they are compared in fp32, within what fp32 costs plain PyTorch. ``auto`` takes them wherever
# they serve a call; test_kernels.py says where that is.
GPU: dict[str, Any] = {"device": "cuda", "dtype": torch.float32, "impls": ("auto",)}
# The same on CPU tensors, in Triton's interpreter, which is slow and is taken by name.
INTERPRETER: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "impls": ("triton",)}

PLACES = [pytest.param({}, id="cpu"), pytest.param(GPU, id="gpu", marks=pytest.mark.gpu)]


def placed(variants: Sequence[object], on_gpu: Sequence[object]) -> list[Any]:
    """A variant and a place each: all on the CPU, and fewer on a GPU, where each has kernels of its own to compile."""
    chosen: list[tuple[object, dict[str, Any], str, Any]] = [(variant, {}, "cpu", ()) for variant in variants]
    chosen += [(variant, GPU, "gpu", (pytest.mark.gpu,)) for variant in on_gpu]
    return [pytest.param(variant, place, id=f"{variant}-{name}", marks=marks) for variant, place, name, marks in chosen]
