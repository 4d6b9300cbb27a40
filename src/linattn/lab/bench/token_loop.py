"""Linear attention written plainly, token by token: a measure of the precision that this order of sums loses.

The quadratic form rounds each score once and divides by the same score, so at the first tokens its error nearly
cancels; and a decay that is multiplied in at every step collects a rounding error each time. A recurrence in low
precision cannot reach the error of the quadratic form, but it can reach that of this loop. The loop shares no code with
the measured forms, so that none of them judges itself.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from linattn.lab.bench.inputs import Inputs

EPS = 1e-6  # the default of linear_attention


def token_loop(causal: bool, inputs: Inputs) -> Tensor:
    """With any decay: that of the query token if causal, of the key token if not."""
    dtype = torch.promote_types(inputs.v.dtype, torch.float32)
    q, k, v = (x.to(dtype) for x in (inputs.phi_q, inputs.phi_k, inputs.v))
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)  # the last channel sums the weights
    decay = None if inputs.log_decay is None else _per_token(inputs.log_decay.to(dtype).exp(), q)
    T = inputs.length
    if decay is None and not causal:
        state = sum((_outer(k, v, t) for t in range(T)), torch.zeros_like(_outer(k, v, 0)))
        sums = torch.stack([_read(q, state, t) for t in range(T)], dim=2)
    elif causal:
        sums = _query_decay(q, k, v, decay)
    else:
        assert decay is not None
        behind = _key_decay(q, k, v, decay, range(T), see_itself=True)
        ahead = _key_decay(q, k, v, decay, range(T - 1, -1, -1), see_itself=False)
        sums = behind + ahead.flip(2)
    return (sums[..., :-1] / (sums[..., -1:] + EPS)).to(inputs.v.dtype)


def _query_decay(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None) -> Tensor:
    state, outputs = torch.zeros_like(_outer(k, v, 0)), []
    for t in range(q.shape[2]):
        state = (state if decay is None else decay[:, :, t] * state) + _outer(k, v, t)
        outputs.append(_read(q, state, t))
    return torch.stack(outputs, dim=2)


def _key_decay(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, order: Iterable[int], see_itself: bool) -> Tensor:
    """Compute rows in the given order."""
    state, outputs = torch.zeros_like(_outer(k, v, 0)), []
    for t in order:
        added = state + _outer(k, v, t)
        outputs.append(_read(q, added if see_itself else state, t))
        state = decay[:, :, t] * added
    return torch.stack(outputs, dim=2)


def _per_token(decay: Tensor, q: Tensor) -> Tensor:
    """Reshape a decay to ``(B, H, T, K or 1, 1)``, as it scales the rows of a state."""
    if decay.ndim == 1:
        decay = decay[None, :, None].expand(q.shape[:3])
    return decay[..., None, None] if decay.ndim == 3 else decay[..., None]


def _outer(k: Tensor, v: Tensor, t: int) -> Tensor:
    return k[:, :, t, :, None] * v[:, :, t, None, :]


def _read(q: Tensor, state: Tensor, t: int) -> Tensor:
    return (q[:, :, t, None] @ state).squeeze(2)
