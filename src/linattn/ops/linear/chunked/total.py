"""Bidirectional attention without decay: every query of a sequence reads one state, the sum over all its keys.

Plain functions without autograd, as in ``scan``; ``library`` makes them one op and groups query heads by key head:
q ``(B, H_kv, G, Tq, K)``, k ``(B, H_kv, 1, Tk, K)``. Queries and keys may differ in number.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

Spans = Iterator[tuple[slice, slice]]


def _spans(cu_seqlens: Tensor | None) -> Spans:
    """For each sequence the slices of its rows of the state and of its tokens."""
    if cu_seqlens is None:
        yield slice(None), slice(None)
        return
    bounds = cu_seqlens.tolist()
    for n in range(len(bounds) - 1):
        yield slice(n, n + 1), slice(bounds[n], bounds[n + 1])


def forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, kv: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator ``(B, H, G, Tq, V)`` and denominator; the state ``kv, z`` is updated."""
    num = torch.empty(*q.shape[:4], v.shape[-1], dtype=kv.dtype, device=q.device)
    den = torch.empty(*q.shape[:4], dtype=kv.dtype, device=q.device)
    for rows, span in _spans(cu_seqlens):
        own_q, own_k, own_v = (x[:, :, :, span].to(kv.dtype) for x in (q, k, v))
        kv[rows] += own_k.mT @ own_v
        z[rows] += own_k.sum(-2).unsqueeze(-1)
        num[:, :, :, span] = own_q @ kv[rows]
        den[:, :, :, span] = (own_q @ z[rows]).squeeze(-1)
    return num, den


def backward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, kv: Tensor, z: Tensor,
    d_num: Tensor, d_den: Tensor, d_kv: Tensor, d_z: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v from the final state ``kv, z``; ``d_kv`` and ``d_z`` become those of the initial state."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for rows, span in _spans(cu_seqlens):
        own_q, own_k, own_v, d_out, d_sum = (x[:, :, :, span].to(kv.dtype) for x in (q, k, v, d_num, d_den))
        d_sum = d_sum.unsqueeze(-1)
        d_kv[rows] += (own_q.mT @ d_out).sum(2, keepdim=True)
        d_z[rows] += (own_q.mT @ d_sum).sum(2, keepdim=True)
        dq[:, :, :, span] = d_out @ kv[rows].mT + d_sum * z[rows].mT
        dk[:, :, :, span] = own_v @ d_kv[rows].mT + d_z[rows].mT
        dv[:, :, :, span] = own_k @ d_kv[rows]
    return dq, dk, dv
