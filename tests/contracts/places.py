"""Where a contract is held: on the CPU in fp64, where all forms agree to the last digits, and on a GPU by kernels."""

from typing import Any

import pytest
import torch

# Kernels take no fp64: they are compared in fp32, within what fp32 costs plain PyTorch. ``auto`` takes them wherever
# they serve a call; tests/kernels/test_choice.py says where that is.
GPU: dict[str, Any] = {"device": "cuda", "dtype": torch.float32, "impls": ("auto",)}

PLACES = [pytest.param({}, id="cpu"), pytest.param(GPU, id="gpu", marks=pytest.mark.gpu)]
