"""PolaFormer++: polarity flows with exponential features."""

from typing import Unpack

import torch
from torch import Tensor, nn

from linattn.mechanisms.base import CommonOptions
from linattn.mechanisms.common.polarity import Flows, TwoFlows, split_signs, swap_halves
from linattn.mechanisms.common.wide import wide
from linattn.mechanisms.registry import register_mechanism

# exp(32)^2 times a billion terms is still a number in fp32.
LARGEST_EXPONENT = 32.0


@register_mechanism("pola_plus", paper="PolaFormer++, TPAMI", year=2026)
class PolaPlus(TwoFlows):
    """Linear attention with separate flows for pairs of equal and of opposite sign, and exponential features.

    With ``x+- = [relu(x), relu(-x)]`` and ``x-+`` its halves exchanged, 2D features each:

    ``same_t = sum_s (exp(a q+-_t) - 1).(exp(k+-_s) - 1) v_s[:D/2] / n_t``,
    ``opposite_t = sum_s (exp(b q-+_t) - 1).(exp(k+-_s) - 1) v_s[D/2:] / n_t``

    n_t is each flow's own row sum plus eps: 1e-6 times the real keys, or 1e-6 when causal. The temperatures
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
        """Both temperatures start at 1/2."""
        nn.init.zeros_(self.same)
        nn.init.zeros_(self.opposite)

    def flows(self, q: Tensor, k: Tensor) -> Flows:
        queries, keys = split_signs(wide(q)), _features(split_signs(wide(k)))
        same = _features(queries * wide(self.same).sigmoid().unsqueeze(1))
        opposite = _features(swap_halves(queries) * wide(self.opposite).sigmoid().unsqueeze(1))
        return Flows(same, opposite, keys, keys)


def _features(x: Tensor) -> Tensor:
    return x.clamp(max=LARGEST_EXPONENT).expm1()
