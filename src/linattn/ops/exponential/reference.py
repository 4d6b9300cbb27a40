"""The specification: exponential attention as a full matrix of weights, O(T^2).

    d_ts = f_{s+1} + .. + f_t + i_s   (s <= t),      d_t0 = f_1 + .. + f_t + m_0   for the initial state
    m_t  = max_s d_ts
    numerator_t   = sum_s e^{d_ts - m_t} (q_t . k_s) v_s
    denominator_t = sum_s e^{d_ts - m_t} (q_t . k_s)

The output is ``numerator_t / max(|denominator_t|, e^{-m_t})``, in which m cancels.
"""

import torch
from torch import Tensor

from linattn.ops.exponential.call import ExponentialState, ExponentialSums, Gates
from linattn.ops.shared.packing import one_by_one


@one_by_one
def exponential_sums(
    q: Tensor,  # (B, H, T, K)
    k: Tensor,  # (B, H_kv, T, K)
    v: Tensor,  # (B, H_kv, T, V)
    gates: Gates,
    initial: ExponentialState,
) -> ExponentialSums:
    q = q.unflatten(1, (k.shape[1], -1))  # (B, H_kv, G, T, K): G query heads share a key head
    exponent = _exponents(gates, initial.log_scale)  # (B, H_kv, T, 1 + T)
    log_scale = exponent.detach().amax(-1)
    # A row that has seen nothing is all -inf: any finite unit gives it the weight 0 that it should have.
    unit = torch.where(log_scale == -torch.inf, 0.0, log_scale).unsqueeze(-1)
    weights = (exponent - unit).exp().to(k)
    carried, weights = weights[..., :1], weights[..., 1:]
    scores = torch.einsum("bhgtk,bhsk->bhgts", q, k) * weights.unsqueeze(2)
    old = q * carried.unsqueeze(2)
    numerator = torch.einsum("bhgts,bhsv->bhgtv", scores, v) + torch.einsum("bhgtk,bhkv->bhgtv", old, initial.kv)
    denominator = scores.sum(-1) + torch.einsum("bhgtk,bhk->bhgt", old, initial.k)
    written, kept = k * weights[:, :, -1, :, None], carried[:, :, -1]
    state = ExponentialState(
        kv=kept.unsqueeze(-1) * initial.kv + torch.einsum("bhsk,bhsv->bhkv", written, v),
        k=kept * initial.k + written.sum(2),
        log_scale=log_scale[..., -1],
    )
    return ExponentialSums(numerator.flatten(1, 2), denominator.flatten(1, 2), log_scale, state)


def _exponents(gates: Gates, initial_log_scale: Tensor) -> Tensor:
    """d_ts, column 0 for the initial state. Each pair adds its own decays up: -inf never meets -inf."""
    f, i = gates.log_decay, gates.log_input
    t = torch.arange(f.shape[2], device=f.device)
    after = t[:, None] > t[None, :]
    between = torch.where(after, f.unsqueeze(-1), 0.0).cumsum(-2)
    pairs = torch.where(after.t(), -torch.inf, between + i.unsqueeze(-2))
    start = f.cumsum(-1) + initial_log_scale.unsqueeze(-1)
    return torch.cat([start.unsqueeze(-1), pairs], dim=-1)
