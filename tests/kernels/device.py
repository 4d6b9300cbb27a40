"""Kernels run on the GPU where there is one, else in Triton's interpreter on CPU tensors (see tests/conftest.py)."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
