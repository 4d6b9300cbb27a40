"""Householder reflections of queries and keys, and the variances that may turn them, in plain PyTorch."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.shared.packing import compute_dtype
from linattn.ops.shared.prepare import hide

# Far below any |w|^2 in training. With a smaller |w|^2 the result, divided by this bound, is not a reflection any more.
SMALLEST_SQUARE = 1e-12
EPS = 1e-6  # added to a variance before its logarithm is taken


class Modulation(NamedTuple):
    """Parameters ``(H_kv, D/2)`` of a change of angles: pi/2 tanh(amplitude) tanh(gain log(var + eps) + bias)."""

    amplitude: Tensor
    gain: Tensor
    bias: Tensor


class Reflected(NamedTuple):
    """q and k after the reflections, and the variances ``(B, H_kv, 1, D/2)`` over their tokens, or None."""

    q: Tensor
    k: Tensor
    variance: Tensor | None


def reflect_heads(
    q: Tensor, k: Tensor, normals: Tensor | None, variance: bool, key_mask: Tensor | None, wide: bool
) -> Reflected:
    """The form in plain PyTorch of ``linattn.ops.reflection.api.reflect_heads``, with its arguments."""
    dtype = compute_dtype(q, k)
    yq, yk = q.to(dtype), k.to(dtype)
    for w in () if normals is None else normals.to(dtype).unbind():
        yq, yk = reflect_across_heads(yq, w), reflect_across_heads(yk, w)
    found = variance_over_rows(yq, yk, key_mask) if variance else None
    return Reflected(yq, yk, found) if wide else Reflected(yq.to(q.dtype), yk.to(k.dtype), found)


def reflect_across_heads(x: Tensor, w: Tensor) -> Tensor:
    """``x - 2 (x.w) w / |w|^2`` over the channels of all heads: x ``(B, H, T, D)``, w ``(H, 1, D)``."""
    return x - (x * w).sum((1, 3), keepdim=True) * (2 * w / w.square().sum().clamp(min=SMALLEST_SQUARE))


def variance_over_rows(q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
    """``pooled_variance`` over the real tokens of each row; if lengths of q and k differ, all queries are real."""
    mask = key_mask if q.shape[2] == k.shape[2] else None
    q, k = hide(q, mask), hide(k, key_mask)

    def count(x: Tensor, mask: Tensor | None) -> Tensor | int:
        return max(x.shape[2], 1) if mask is None else mask.sum(1).clamp(min=1).to(x.dtype)[:, None, None, None]

    number = count(k, key_mask) + q.shape[1] // k.shape[1] * count(q, mask)

    def mean(q: Tensor, k: Tensor) -> Tensor:
        queries = hide(q, mask).unflatten(1, (k.shape[1], -1)).sum((2, 3))
        return (queries + hide(k, key_mask).sum(2)).unsqueeze(2) / number

    return pooled_variance(q, k, mean)


def pooled_variance(q: Tensor, k: Tensor, mean: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Variance over tokens, averaged over the two channels of a pair: ``(B, H_kv, 1 or T, D/2)``.

    Keys and the queries that share them are one sample; ``mean(q, k)`` is its mean ``(B, H_kv, 1 or T, D)``.
    """
    center = mean(q, k)
    away = q - center.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return mean(away.square(), (k - center).square()).unflatten(-1, (-1, 2)).mean(-1)


def turned(angles: Tensor, variance: Tensor | None, modulation: Modulation | None) -> list[Tensor]:
    """The R ``angles (R, H_kv, D/2)`` as a list, ``(.., H_kv, 1 or T, D/2)`` each; the variance changes the last."""
    each = list(angles.to(compute_dtype(angles)).unsqueeze(2).unbind())
    if each and variance is not None and modulation is not None:
        amplitude, gain, bias = (p.to(variance.dtype).unsqueeze(1) for p in modulation)
        shift = math.pi / 2 * amplitude.tanh() * (gain * (variance + EPS).log() + bias).tanh()
        each[-1] = each[-1] + shift
    return each


def pair_matrices(angles: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Factors of a channel and of the other channel of its pair in reflections by these angles, at least one.

    Both are ``(1 or B, H_kv, D)``, from angles ``(.., H_kv, 1, D/2)``.
    """
    one, zero = torch.ones_like(angles[0]), torch.zeros_like(angles[0])
    aa, ab, ba, bb = one, zero, zero, one  # the matrix by rows: the first channel from a and b, the second from a and b
    for angle in angles:
        cos, sin = (2 * angle).cos(), (2 * angle).sin()
        aa, ab, ba, bb = -(cos * aa + sin * ba), -(cos * ab + sin * bb), cos * ba - sin * aa, cos * bb - sin * ab
    own, other = (torch.stack(pair, dim=-1).flatten(-2).squeeze(-2) for pair in ((aa, bb), (ab, ba)))
    return (own, other) if own.ndim == 3 else (own.unsqueeze(0), other.unsqueeze(0))
