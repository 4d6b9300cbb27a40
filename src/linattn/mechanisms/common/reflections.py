"""Householder reflections of queries and keys, and the variances that may turn them."""

from dataclasses import replace

import torch
from torch import Tensor

from linattn.mechanisms.base import Call
from linattn.mechanisms.common.over_tokens import count_tokens, query_mask, sum_over_tokens
from linattn.ops import checks
from linattn.ops.prepare import hide

# Far below any |w|^2 that training meets: what is divided by more than |w|^2 is no reflection any more.
SMALLEST_SQUARE = 1e-12


def reflect_across_heads(x: Tensor, w: Tensor) -> Tensor:
    """``x - 2 (x.w) w / |w|^2`` over the channels of all heads: x ``(B, H, T, D)``, w ``(H, 1, D)``."""
    return x - (x * w).sum((1, 3), keepdim=True) * (2 * w / w.square().sum().clamp(min=SMALLEST_SQUARE))


def reflect_pairs(x: Tensor, angle: Tensor) -> Tensor:
    """Reflect every pair of neighbouring channels along ``u = (cos angle, sin angle)``.

    x ``(B, H, T, D)``, angle ``(.., H_kv, 1 or T, D/2)``: the heads of a group share theirs.
    """
    a, b = x.unflatten(1, (angle.shape[-3], -1)).unflatten(-1, (-1, 2)).unbind(-1)  # (B, H_kv, group, T, D/2)
    cos, sin = (2 * angle).cos().unsqueeze(-3), (2 * angle).sin().unsqueeze(-3)
    return torch.stack([-(cos * a + sin * b), cos * b - sin * a], dim=-1).flatten(-2).flatten(1, 2)


def reflect_by(x: Tensor, angles: list[Tensor]) -> Tensor:
    """``reflect_pairs`` by one angle after the other."""
    for angle in angles:
        x = reflect_pairs(x, angle)
    return x


def pair_matrices(angles: list[Tensor]) -> tuple[Tensor, Tensor]:
    """What ``reflect_by`` multiplies a channel with, and the other channel of its pair: ``(1 or B, H_kv, D)`` each.

    The angles, at least one, are ``(.., H_kv, 1, D/2)``.
    """
    one, zero = torch.ones_like(angles[0]), torch.zeros_like(angles[0])
    aa, ab, ba, bb = one, zero, zero, one  # the first channel from the first, from the second; the second from ...
    for angle in angles:
        cos, sin = (2 * angle).cos(), (2 * angle).sin()
        aa, ab, ba, bb = -(cos * aa + sin * ba), -(cos * ab + sin * bb), cos * ba - sin * aa, cos * bb - sin * ab
    own, other = (torch.stack(pair, dim=-1).flatten(-2).squeeze(-2) for pair in ((aa, bb), (ab, ba)))
    return (own, other) if own.ndim == 3 else (own.unsqueeze(0), other.unsqueeze(0))


def variance_within_token(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """Variance of each pair of channels around its own mean, ``((a - b) / 2)^2``: ``(B, H_kv, T, D/2)``.

    The mean over the key and the queries that share it, so that one angle serves all of them.
    """
    checks.check_size("k", "length", k.shape[2], q.shape[2], "q")
    q = hide(q, call.key_mask).unflatten(1, (k.shape[1], -1))
    a, b = torch.cat([q, k.unsqueeze(2)], dim=2).unflatten(-1, (-1, 2)).unbind(-1)
    return ((a - b) / 2).square().mean(2)


def variance_over_tokens(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """Variance over the real tokens of each sequence, mean of the two channels of a pair: ``(B, H_kv, 1 or T, D/2)``.

    Keys and the queries that share them are one sample. Queries of another length than the keys are all real.
    """
    mask, H_kv, group = query_mask(q, k, call), k.shape[1], q.shape[1] // k.shape[1]
    q, keys = hide(q, mask), count_tokens(k.shape[2], call, k)
    count = keys + group * (keys if q.shape[2] == k.shape[2] else q.shape[2])

    def mean(q: Tensor, k: Tensor) -> Tensor:
        queries = sum_over_tokens(q.unflatten(1, (H_kv, group)).sum(2), replace(call, key_mask=mask))
        return (queries + sum_over_tokens(k, call)) / count

    center = mean(q, k)
    away_q = q - center.repeat_interleave(group, dim=1)
    return mean(away_q.square(), (k - center).square()).unflatten(-1, (-1, 2)).mean(-1)
