"""The specification: linear attention as a full matrix of weights, O(T^2).

    numerator_t   = sum_s M_ts (phi_t . psi_s) v_s
    denominator_t = sum_s M_ts (phi_t . psi_s)

With a decay ``a = log lambda <= 0``, inclusive sums ``c_i = a_1 + .. + a_i`` and exclusive ``e_i = c_i - a_i``:

    decay_index   below the diagonal (s < t)    above it (s > t, bidirectional only)
    "query"       exp(c_t - c_s)                exp(e_s - e_t)
    "key"         exp(e_t - e_s)                exp(c_s - c_t)

so that a pair's product includes the decay of the query token or that of the key token, never both.
"""

import torch
from torch import Tensor

from linattn.ops.shared.packing import one_by_one
from linattn.ops.shared.types import LinearState, Pattern, Sums


@one_by_one
def linear_sums(
    q: Tensor,  # (B, H, Tq, K)
    k: Tensor,  # (B, H_kv, Tk, K)
    v: Tensor,  # (B, H_kv, Tk, V)
    pattern: Pattern,
    initial: LinearState,
) -> Sums:
    q = q.unflatten(1, (k.shape[1], -1))  # (B, H_kv, G, Tq, K): G query heads share a key head
    if pattern.log_decay is None:
        scores = torch.einsum("bhgtk,bhsk->bhgts", q, k)
        if pattern.causal:
            scores = scores.tril()
        read, write, keep = k.new_ones(1, 1, 1, 1), k.new_ones(1, 1, 1, 1), k.new_ones(1, 1, 1)
    else:
        weights, read, write, keep = _decay_weights(pattern, k)
        scores = torch.einsum("bhgtk,bhsk,bhtsk->bhgts", q, k, weights)
    numerator = torch.einsum("bhgts,bhsv->bhgtv", scores, v)
    numerator = numerator + torch.einsum("bhgtk,bhkv->bhgtv", q * read.unsqueeze(2), initial.kv)
    denominator = scores.sum(-1) + torch.einsum("bhgtk,bhk->bhgt", q * read.unsqueeze(2), initial.k)
    state = LinearState(
        kv=keep.unsqueeze(-1) * initial.kv + torch.einsum("bhsk,bhsv->bhkv", k * write, v),
        k=keep * initial.k + (k * write).sum(2),
    )
    return Sums(numerator.flatten(1, 2), denominator.flatten(1, 2), state)


def _decay_weights(pattern: Pattern, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """M (B, H_kv, T, T, K) and how the state is read (T), written (T) and kept across the sequence."""
    assert pattern.log_decay is not None
    a = pattern.log_decay.double()
    a = a[None, :, None, None] if a.ndim == 1 else a[..., None] if a.ndim == 3 else a
    a = a.expand(k.shape)
    c = a.cumsum(2)
    e = c - a
    f, b = (e, c) if pattern.decay_index == "key" else (c, e)
    t = torch.arange(k.shape[2], device=k.device)
    below = (t[:, None] >= t[None, :]).unsqueeze(-1)
    exponent = torch.where(below, f.unsqueeze(3) - f.unsqueeze(2), b.unsqueeze(2) - b.unsqueeze(3))
    if pattern.causal:
        exponent = exponent.masked_fill(~below, -torch.inf)
    total = a.sum(2)
    read, write, keep = f, total.unsqueeze(2) - f, total
    return (exponent.exp().to(k), read.exp().to(k), write.exp().to(k), keep.exp().to(k))
