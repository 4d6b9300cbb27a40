"""Reflections of queries and keys by angles that may differ from token to token."""

from dataclasses import replace

import torch
from torch import Tensor

from linattn.mechanisms.base import Call
from linattn.mechanisms.common.over_tokens import count_tokens, query_mask, sum_over_tokens
from linattn.ops.reflection.api import pooled_variance
from linattn.ops.shared import checks
from linattn.ops.shared.call import hide


def reflect_pairs(x: Tensor, angle: Tensor) -> Tensor:
    """Reflect every pair of neighbouring channels along ``u = (cos angle, sin angle)``.

    x ``(B, H, T, D)``, angle ``(.., H_kv, 1 or T, D/2)``: the query heads of a group share their angles.
    """
    a, b = x.unflatten(1, (angle.shape[-3], -1)).unflatten(-1, (-1, 2)).unbind(-1)  # (B, H_kv, group, T, D/2)
    cos, sin = (2 * angle).cos().unsqueeze(-3), (2 * angle).sin().unsqueeze(-3)
    return torch.stack([-(cos * a + sin * b), cos * b - sin * a], dim=-1).flatten(-2).flatten(1, 2)


def reflect_by(x: Tensor, angles: list[Tensor]) -> Tensor:
    """Apply ``reflect_pairs`` with one angle after the other."""
    for angle in angles:
        x = reflect_pairs(x, angle)
    return x


def variance_within_token(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """Variance of each pair of channels around the pair's mean, ``((a - b) / 2)^2``: ``(B, H_kv, T, D/2)``.

    It is averaged over the key and the queries that share it, so that one angle serves all of them.
    """
    checks.check_size("k", "length", k.shape[2], q.shape[2], "q")
    q = hide(q, call.key_mask).unflatten(1, (k.shape[1], -1))
    a, b = torch.cat([q, k.unsqueeze(2)], dim=2).unflatten(-1, (-1, 2)).unbind(-1)
    return ((a - b) / 2).square().mean(2)


def variance_over_packed(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """``pooled_variance`` over the real tokens of each token's own packed sequence: ``(B, H_kv, T, D/2)``."""
    mask, H_kv, group = query_mask(q, k, call), k.shape[1], q.shape[1] // k.shape[1]
    q, count = hide(q, mask), (1 + group) * count_tokens(k.shape[2], call, k)

    def mean(q: Tensor, k: Tensor) -> Tensor:
        queries = sum_over_tokens(q.unflatten(1, (H_kv, group)).sum(2), replace(call, key_mask=mask))
        return (queries + sum_over_tokens(k, call)) / count

    return pooled_variance(q, k, mean)
