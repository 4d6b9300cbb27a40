"""Exponential attention in linear time: with a running maximum it is a linear attention with a decay.

In units of ``e^{m_t}`` the sums decay by ``g_t = f_t + m_{t-1} - m_t <= 0`` and take in keys scaled by
``e^{i_t - m_t} <= 1``; see :mod:`linattn.ops.exponential.stabilizer`.
"""

from torch import Tensor

from linattn.ops.exponential.call import ExponentialState, ExponentialSums, Gates
from linattn.ops.exponential.stabilizer import stabilize
from linattn.ops.linear.chunked.sums import linear_sums
from linattn.ops.shared.types import LinearState, Pattern


def exponential_sums(q: Tensor, k: Tensor, v: Tensor, gates: Gates, initial: ExponentialState) -> ExponentialSums:
    stable = stabilize(gates.log_input, gates.log_decay, initial.log_scale, gates.cu_seqlens)
    k = k * stable.log_gain.exp().to(k).unsqueeze(-1)
    pattern = Pattern(causal=True, log_decay=stable.log_decay, decay_index="query", cu_seqlens=gates.cu_seqlens)
    sums = linear_sums(q, k, v, pattern, LinearState(initial.kv, initial.k))
    state = ExponentialState(sums.state.kv, sums.state.k, stable.final_log_scale)
    return ExponentialSums(sums.numerator, sums.denominator, stable.log_scale, state)
