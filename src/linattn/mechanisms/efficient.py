"""Efficient attention: one softmax over channels, one over tokens."""

from typing import ClassVar

from torch import Tensor

from linattn.mechanisms.base import Call, LinearBase, MechanismOutput
from linattn.mechanisms.common.linear import wide
from linattn.mechanisms.common.tokens import query_mask, softmax_features
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.shared.call import hide


@register_mechanism("efficient", paper="arXiv:1812.01243", year=2018, causal=False, state="none")
class Efficient(LinearBase):
    """Linear attention with queries softmaxed over channels and keys over tokens.

    ``o_t = sum_s (sum_i softmax_i(q_t)_i softmax_s(k)_si) v_s``

    The weights are positive and sum to 1 without a denominator. The second softmax runs over all real tokens of the
    sequence, which is why there is no recurrent form. q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``,
    output ``(B, H, T, D)``.

    Paper: Shen et al., Efficient Attention: Attention with Linear Complexities.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("efficient", num_heads=2, head_dim=8)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v).shape
        torch.Size([1, 2, 5, 8])
    """

    rotates: ClassVar[None] = None  # keys are softmaxed channel by channel: a rotation would mix these

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        queries = hide(wide(q), query_mask(q, k, call))
        phi, psi = softmax_features(queries, wide(k), call)
        # The row sums are at least 1: eps only serves queries that see no key.
        return self.linear(call, {"q": phi.to(q.dtype), "k": psi.to(k.dtype), "v": v, "eps": 1e-12})
