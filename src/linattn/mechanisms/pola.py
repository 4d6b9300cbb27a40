"""PolaFormer: same-signed and opposite-signed pairs in separate flows."""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mechanisms.base import CommonOptions
from linattn.mechanisms.common.linear import TwoFlows, wide
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.maps import SplitPower
from linattn.ops.shared.call import check_number


@register_mechanism("pola", paper="arXiv:2501.15061", year=2025)
class Pola(TwoFlows):
    """Linear attention with separate flows for pairs of equal and of opposite sign, sharpened by a learned power.

    In ``q.k = (q+.k+ + q-.k-) - (q+.k- + q-.k+)`` the first bracket becomes the weight of the first half of v's
    channels and the second bracket that of the other half, without the subtraction. With the 2D features
    ``phi(x) = [relu(x/c)^p, relu(-x/c)^p]``:

    ``same_t = sum_s phi(q_t).phi(k_s) v_s[:D/2] / n_t``, ``opposite_t = sum_s phi(q_t).swap(phi(k_s)) v_s[D/2:] / n_t``

    where swap exchanges the two halves and n_t is each flow's own row sum plus eps, 1e-6 times the number of real keys,
    or 1e-6 when causal. ``p = 1 + alpha sigmoid(w)`` and ``c = softplus(s)`` are learned per kv head and channel; w and
    s start at 0. q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, output ``(B, H, T, D)`` with the two flows side by
    side. The paper's position term, convolution and gate belong to the layer.

    Paper: Meng et al., PolaFormer. State per kv head: ``2 D (D + 2)`` numbers, for an even D.

    Args:
        alpha: range of the power p, which lies between 1 and 1 + alpha.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("pola", num_heads=2, head_dim=8)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v).shape, mechanism.num_parameters
        (torch.Size([1, 2, 5, 8]), 32)
    """

    def __init__(self, num_heads: int, head_dim: int, *, alpha: float = 4, **common: Unpack[CommonOptions]) -> None:
        super().__init__(num_heads, head_dim, **common)
        check_number("alpha", alpha, above=0)
        self.alpha = float(alpha)
        self.power = nn.Parameter(torch.empty(self.num_kv_heads, head_dim))
        self.scale = nn.Parameter(torch.empty(self.num_kv_heads, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset w and s to 0: powers start at ``1 + alpha/2``, scales at ``log 2``."""
        nn.init.zeros_(self.power)
        nn.init.zeros_(self.scale)

    def features(self, x: Tensor) -> Tensor:
        """phi: ``(B, H or H_kv, T, D) -> (.., 2D)`` in fp32 or fp64."""
        return self.maps()[0].one_flow(wide(x))

    def maps(self) -> tuple[SplitPower, SplitPower]:
        """The maps of q, whose two flows are equal, and of k, whose second flow has its halves exchanged."""
        power, factor = 1 + self.alpha * wide(self.power).sigmoid(), 1 / F.softplus(wide(self.scale))
        return SplitPower(power, factor), SplitPower(power, factor, opposite=True)
