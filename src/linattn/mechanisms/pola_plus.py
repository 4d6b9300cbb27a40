"""PolaFormer++: polarity flows with exponential features."""

from typing import Unpack

import torch
from torch import nn

from linattn.mechanisms.base import CommonOptions
from linattn.mechanisms.common.linear import TwoFlows, wide
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.maps import SplitExpm1


@register_mechanism("pola_plus", paper="PolaFormer++, TPAMI", year=2026)
class PolaPlus(TwoFlows):
    """Linear attention with separate flows for pairs of equal and of opposite sign, and exponential features.

    With ``x+- = [relu(x), relu(-x)]`` and ``x-+`` its halves exchanged, 2D features each:

    ``same_t = sum_s (exp(a q+-_t) - 1).(exp(k+-_s) - 1) v_s[:D/2] / n_t``,
    ``opposite_t = sum_s (exp(b q-+_t) - 1).(exp(k+-_s) - 1) v_s[D/2:] / n_t``

    n_t is each flow's own row sum plus eps, 1e-6 times the number of real keys, or 1e-6 when causal. The temperatures
    ``a = sigmoid(same)`` and ``b = sigmoid(opposite)`` are learned per query head and feature and start at 1/2; keys
    have none. q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, output ``(B, H, T, D)``, the two flows side by side.
    Exponents are bounded at 32, where sums in fp32 would begin to overflow. The paper's rotary positions,
    convolution and gate belong to the layer.

    Paper: PolaFormer++ (TPAMI 2026). State per kv head: ``2 D (D + 2)`` numbers, for an even D.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("pola_plus", num_heads=2, head_dim=8)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v).shape, mechanism.num_parameters
        (torch.Size([1, 2, 5, 8]), 64)
    """

    def __init__(self, num_heads: int, head_dim: int, **common: Unpack[CommonOptions]) -> None:
        super().__init__(num_heads, head_dim, **common)
        self.same = nn.Parameter(torch.empty(num_heads, 2 * head_dim))
        self.opposite = nn.Parameter(torch.empty(num_heads, 2 * head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset both temperatures to 1/2."""
        nn.init.zeros_(self.same)
        nn.init.zeros_(self.opposite)

    def maps(self) -> tuple[SplitExpm1, SplitExpm1]:
        """The maps of q, with temperatures and with halves exchanged in the second flow, and of k, without either."""
        same, opposite = wide(self.same).sigmoid(), wide(self.opposite).sigmoid()
        return SplitExpm1(same, opposite, opposite=True), SplitExpm1(torch.ones_like(same[:1]))
