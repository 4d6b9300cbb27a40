"""Exponential attention as a recurrence, token by token: O(T) time, the form of decoding.

m_t = max(m_{t-1} + f_t, i_t)
C_t = e^{f_t + m_{t-1} - m_t} C_{t-1} + e^{i_t - m_t} k_t v_t^T,     n_t likewise with 1 in place of v
numerator_t = q_t C_t,   denominator_t = q_t . n_t,   both in units of e^{m_t}
"""

import torch
from torch import Tensor

from linattn.ops.exponential.call import ExponentialState, ExponentialSums, Gates
from linattn.ops.shared.packing import one_by_one


@one_by_one
def exponential_sums(q: Tensor, k: Tensor, v: Tensor, gates: Gates, initial: ExponentialState) -> ExponentialSums:
    kv, keys, m = initial
    numerators, denominators, scales = [], [], []
    for t in range(k.shape[2]):
        f, i, k_t = gates.log_decay[:, :, t], gates.log_input[:, :, t], k[:, :, t]
        new_m = torch.maximum(m + f, i).detach()
        keep, write = _in_units_of(m + f, new_m).to(k), _in_units_of(i, new_m).to(k)
        written = write.unsqueeze(-1) * k_t
        kv = keep[..., None, None] * kv + written.unsqueeze(-1) * v[:, :, t].unsqueeze(-2)
        keys = keep.unsqueeze(-1) * keys + written
        m = new_m
        q_t = q[:, :, t].unflatten(1, (k.shape[1], -1))  # (B, H_kv, G, K)
        numerators.append((q_t @ kv).flatten(1, 2))
        denominators.append((q_t @ keys.unsqueeze(-1)).squeeze(-1).flatten(1, 2))
        scales.append(m)
    numerator, denominator, log_scale = (torch.stack(x, dim=2) for x in (numerators, denominators, scales))
    return ExponentialSums(numerator, denominator, log_scale, ExponentialState(kv, keys, m))


def _in_units_of(exponent: Tensor, m: Tensor) -> Tensor:
    """``e^{exponent - m}``; 0 where both are -inf, because no token came yet."""
    return (exponent - torch.where(m == -torch.inf, 0.0, m)).exp()
