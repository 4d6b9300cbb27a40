"""RALA: keys weighted by how much the average query asks for them."""

from dataclasses import replace

from torch import Tensor

from linattn.mechanisms.base import Call, MechanismOutput
from linattn.mechanisms.common.linear import WideLinear, wide
from linattn.mechanisms.common.tokens import count_tokens, exp_over_tokens, mean_eps, query_mask, sum_over_tokens
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.maps import EluPlusOne
from linattn.ops.shared.call import hide


@register_mechanism("rala", paper="arXiv:2411.07635", year=2024, causal=False, state="none")
class Rala(WideLinear):
    """Linear attention with keys weighted by the average query's attention to them, for a state of higher rank.

    ``o_t = sum_s phi(q_t).(alpha_s phi(k_s)) v_s / (sum_s phi(q_t).(alpha_s phi(k_s)) + 1e-6 N)``,
    ``alpha_s = N softmax_s(m.phi(k_s) / sqrt(D))``, ``m = mean_t phi(q_t)``, ``phi(x) = elu(x) + 1``

    N counts the real tokens of the sequence. Mean and softmax run over them, so every new token changes all weights,
    which is why there is no recurrent form. q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, output
    ``(B, H, T, D)``; query heads that share a key head also share m, the mean over all of them. The paper's rotary
    positions, local branch and gate belong to the layer.

    Paper: Fan et al., Breaking the Low-Rank Dilemma of Linear Attention.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("rala", num_heads=2, head_dim=8)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v).shape
        torch.Size([1, 2, 5, 8])
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        own = replace(call, key_mask=query_mask(q, k, call))  # the queries' own padding
        phi, psi = EluPlusOne()(hide(wide(q), own.key_mask)), EluPlusOne()(wide(k))
        per_kv_head = phi.unflatten(1, (self.num_kv_heads, -1)).mean(2)
        mean = sum_over_tokens(per_kv_head, own) / count_tokens(q.shape[2], own, phi)
        score = (mean * psi).sum(-1, keepdim=True) * self.head_dim**-0.5
        share = exp_over_tokens(score, call)
        total = sum_over_tokens(share, call)
        alpha = share * (count_tokens(k.shape[2], call, psi) / total.masked_fill(total == 0, 1))
        phi, eps = mean_eps(phi, k, call)
        return self.linear(call, {"q": phi, "k": alpha * psi, "v": v, "eps": eps})
