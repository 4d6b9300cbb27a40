"""Attention with scores that a bias, or a mask of pairs, is added to, and whose weights can be dropped out."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.softmax import Softmax
from linattn.mechanisms.zeros_softmax import ZerosSoftmax
from linattn.ops.shared.call import compute_dtype, without_autocast

HIDDEN = -50.0  # Swin hides a key by a bias of -100: keys with a bias below this are hidden


def has_scores(mechanism: Mechanism) -> bool:
    """Whether the mechanism has scores that a bias, or a mask of pairs, can be added to."""
    return isinstance(mechanism, Softmax | ZerosSoftmax)


def attend_with_scores(
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    x: Tensor,
    bias: Tensor | None,
    dropout: float,
    key_mask: Tensor | None,
) -> Tensor:
    """Attention output ``(B, H, T, D)`` of a mechanism that :func:`has_scores`.

    ``bias`` broadcasts to ``(B, H, Tq, Tk)`` and is added to the scores; dropout applies to the weights.
    """
    if key_mask is not None:
        hidden = torch.zeros_like(key_mask, dtype=q.dtype).masked_fill(~key_mask, -torch.inf)[:, None, None]
        bias = hidden if bias is None else bias + hidden
    bias = None if bias is None else bias.to(q.dtype)
    if isinstance(mechanism, Softmax):
        grouped = mechanism.num_heads != mechanism.num_kv_heads
        return F.scaled_dot_product_attention(
            q, k, v, bias, dropout_p=dropout, scale=mechanism.scale, enable_gqa=grouped
        )
    assert isinstance(mechanism, ZerosSoftmax)
    return biased_zeros(mechanism, q, k, v, x, bias, dropout)


def biased_zeros(
    mechanism: ZerosSoftmax, q: Tensor, k: Tensor, v: Tensor, x: Tensor, bias: Tensor | None, dropout: float
) -> Tensor:
    """ZeroS-SM by its formula, for logits ``z = q.k / sqrt(D) + bias`` and the keys that the bias does not hide.

    ``w = gh softmax(z) + ((g1 - gh) (z - mean z) + (g0 - gh)) / N``; with all gates at 1 this is biased softmax.
    """
    dtype, out_dtype = compute_dtype(q, k, v), v.dtype
    g1, gh, g0 = mechanism.gates(x)
    with without_autocast(q):
        group = mechanism.num_heads // mechanism.num_kv_heads
        q, k, v = (t.to(dtype) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        z = q @ k.mT * mechanism.head_dim**-0.5
        seen = torch.ones_like(z[:, :1, :1])
        if bias is not None:
            z, seen = z + bias, (bias > HIDDEN).to(dtype)
        count = seen.sum(-1, keepdim=True).clamp(min=1)
        scores = torch.where(seen > 0, z, 0.0)
        centred = scores - (scores * seen).sum(-1, keepdim=True) / count
        weights = gh * z.softmax(-1) + seen * ((g1 - gh) * centred + (g0 - gh)) / count
        return (F.dropout(weights, dropout, training=dropout > 0) @ v).to(out_dtype)
