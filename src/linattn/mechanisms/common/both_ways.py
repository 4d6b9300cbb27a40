"""Exponential attention over the whole sequence: the recurrence from both ends, each token counted once."""

import torch
from torch import Tensor

from linattn.mechanisms.common.directions import output_dtype
from linattn.ops.exponential.api import EXPONENT_BOUND
from linattn.ops.exponential.stabilizer import stabilize
from linattn.ops.linear.api import linear_attention
from linattn.ops.shared.call import compute_dtype, hide, widen, without_autocast


def exponential_both_ways(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_input: Tensor,
    log_decay: Tensor,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Bidirectional exponential attention: ``o_t = sum_s w_ts v_s / max(|sum_s w_ts|, 1)``.

    ``w_ts = F_ts e^{i_s} q_t . k_s``, where ``F_ts`` is the product of the decay of t and the decays between t and s,
    and 1 for s = t. Shapes are those of ``exponential_attention``; ``q`` must be scaled already.

    The sums along the sequence are in units of ``e^{m_t}`` with m their running maximum, and the sums against it in
    units of their own. Both include the token t itself, so it is subtracted once. The rounding error of that is small
    compared with the same token in the other sum.
    """
    dtype, out_dtype = compute_dtype(q, k, v), output_dtype(q, v)
    with without_autocast(q):
        q, k, v = (x.to(dtype) for x in (q, hide(k, key_mask), hide(v, key_mask)))
        i, f = widen(log_input), widen(log_decay)
        if key_mask is not None:
            i, f = (x.masked_fill(~key_mask.unsqueeze(1), value) for x, value in ((i, -torch.inf), (f, 0.0)))
        values = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)  # a column of ones sums the weights
        group = q.shape[1] // k.shape[1]

        def weigh(sums: Tensor, exponent: Tensor) -> Tensor:
            return sums * exponent.exp().to(dtype).repeat_interleave(group, dim=1).unsqueeze(-1)

        def sweep(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, cu: Tensor | None) -> tuple[Tensor, Tensor]:
            stable = stabilize(i, f, cu_seqlens=cu)
            k = k * stable.log_gain.exp().to(dtype).unsqueeze(-1)
            sums = linear_attention(
                q, k, v, causal=True, log_decay=stable.log_decay, decay_index="query", normalizer=None, cu_seqlens=cu,
                impl=impl,
            )  # fmt: skip
            return sums, stable.log_scale

        one, m_one = sweep(q, k, values, i, f, cu_seqlens)
        reversed_cu = None if cu_seqlens is None else k.shape[2] - cu_seqlens.flip(0)
        back = [x.flip(2) for x in (q, k, values, i, f)]
        two, m_two = (x.flip(2) for x in sweep(back[0], back[1], back[2], back[3], back[4], reversed_cu))
        m = torch.maximum(m_one, m_two)
        m = torch.where(m == -torch.inf, 0.0, m)  # no token is real
        own = (q * k.repeat_interleave(group, dim=1)).sum(-1, keepdim=True) * values.repeat_interleave(group, dim=1)
        total = weigh(one, m_one - m) + weigh(two, m_two - m) - weigh(own, i - m)
        bound = EXPONENT_BOUND[dtype]
        least = weigh(torch.ones_like(total[..., :1]), (-m).clamp(-bound, bound))
        return (total[..., :-1] / torch.maximum(total[..., -1:].abs(), least)).to(out_dtype)
