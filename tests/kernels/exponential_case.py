"""Inputs of exponential attention for the tests of its kernels."""

import torch
import torch.nn.functional as F

from kernels.device import DEVICE

B, H, H_KV, T = 2, 2, 1, 19


def draw(
    *, width=16, values=16, dtype=torch.float32, gate=2.0, state=False, rows=B, heads=(H, H_KV), length=T,
    sequences=None, signed=False,
):  # fmt: skip
    """Queries and keys >= 0, unless signed: a row sum is then far from 0, and its rounding is not the whole result."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=g)

    (H, H_kv), size = heads, torch.clone if signed else torch.abs
    tensors = {
        "q": size(randn(rows, H, length, width)).to(dtype),
        "k": size(randn(rows, H_kv, length, width)).to(dtype),
        "v": randn(rows, H_kv, length, values).to(dtype),
        "log_input": gate * randn(rows, H_kv, length),
        "log_decay": F.logsigmoid(randn(rows, H_kv, length) + 2),
    }
    if state:
        n = sequences or rows
        tensors["kv"], tensors["z"] = randn(n, H_kv, width, values), randn(n, H_kv, width).abs()
        tensors["log_scale"] = randn(n, H_kv)
    return {name: x.to(DEVICE) for name, x in tensors.items()}
