"""Linear attention as a recurrence, token by token: O(T) time, the form of decoding.

    decay_index="query":  S_t = lambda_t S_{t-1} + psi_t v_t^T,        o_t = phi_t S_t
    decay_index="key":    R_t = S_{t-1} + psi_t v_t^T,                 o_t = phi_t R_t,   S_t = lambda_t R_t

A bidirectional decay is two such sweeps; the one that runs backwards leaves its own token out, so that the
diagonal counts once.
"""

import torch
from torch import Tensor

from linattn.ops.shared.packing import both_ways, one_by_one
from linattn.ops.shared.types import LinearState, Pattern, Sums


@one_by_one
def linear_sums(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, initial: LinearState) -> Sums:
    if pattern.causal:
        return sweep(q, k, v, pattern, initial)
    if pattern.log_decay is not None:
        return both_ways(sweep, q, k, v, pattern, initial)
    state = initial
    for t in range(k.shape[2]):
        state = _add(state, k[:, :, t], v[:, :, t])
    outputs = [_read(state, q[:, :, t]) for t in range(q.shape[2])]
    return _stack(outputs, state, q, v)


def sweep(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, initial: LinearState, strict: bool = False) -> Sums:
    """One causal pass; in a strict one no token sees itself."""
    state, outputs = initial, []
    for t in range(k.shape[2]):
        decay = _decay_at(pattern.log_decay, t, k)
        if pattern.decay_index == "query":
            state = _scale(state, decay)
        if strict:
            outputs.append(_read(state, q[:, :, t]))
        state = _add(state, k[:, :, t], v[:, :, t])
        if not strict:
            outputs.append(_read(state, q[:, :, t]))
        if pattern.decay_index == "key":
            state = _scale(state, decay)
    return _stack(outputs, state, q, v)


def _decay_at(log_decay: Tensor | None, t: int, like: Tensor) -> Tensor | None:
    """lambda_t, in a shape that scales the keys (B, H_kv, K) of a state."""
    if log_decay is None:
        return None
    a = log_decay[:, None] if log_decay.ndim == 1 else log_decay[:, :, t]
    return (a.unsqueeze(-1) if log_decay.ndim == 3 else a).to(like).exp()


def _scale(state: LinearState, decay: Tensor | None) -> LinearState:
    if decay is None:
        return state
    return LinearState(decay.unsqueeze(-1) * state.kv, decay * state.k)


def _add(state: LinearState, k_t: Tensor, v_t: Tensor) -> LinearState:
    return LinearState(state.kv + k_t.unsqueeze(-1) * v_t.unsqueeze(-2), state.k + k_t)


def _read(state: LinearState, q_t: Tensor) -> tuple[Tensor, Tensor]:
    q_t = q_t.unflatten(1, (state.k.shape[1], -1))  # (B, H_kv, G, K)
    numerator, denominator = q_t @ state.kv, (q_t @ state.k.unsqueeze(-1)).squeeze(-1)
    return numerator.flatten(1, 2), denominator.flatten(1, 2)


def _stack(outputs: list[tuple[Tensor, Tensor]], state: LinearState, q: Tensor, v: Tensor) -> Sums:
    if not outputs:
        return Sums(q.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3]), state)
    return Sums(torch.stack([o for o, _ in outputs], dim=2), torch.stack([d for _, d in outputs], dim=2), state)
