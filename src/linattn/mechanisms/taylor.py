"""Taylor features: the exponential to second order."""

from typing import Any, Unpack

from torch import Tensor, nn

from linattn.mechanisms.base import CommonOptions, LinearMechanism
from linattn.mechanisms.common.linear import HeadwiseLinear
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.maps import TaylorExp
from linattn.ops.shared.call import check_integer


@register_mechanism("taylor", paper="arXiv:2402.18668", year=2024)
class Taylor(LinearMechanism):
    """Linear attention with the exponential's second-order Taylor series.

    ``o_t = sum_s w_ts v_s / sum_s w_ts``, ``w = 1 + z + z^2 / 2 >= 1/2``, ``z = (A q_t).(C k_s) / sqrt(F)``

    q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, output ``(B, H, T, D)``. The learned matrices A (one per head) and
    C (one per kv head) map D channels to F and are initialised as in ``nn.Linear``.

    Paper: Arora et al., Based. State per kv head: ``(F + 1)(F + 2)/2 (D + 1)`` numbers.

    Args:
        feature_dim: F, width of the projected queries and keys; None leaves A and C out, so that F = D.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("taylor", num_heads=2, head_dim=8, feature_dim=4)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v).shape, mechanism.num_features
        (torch.Size([1, 2, 5, 8]), 15)
    """

    def __init__(
        self, num_heads: int, head_dim: int, *, feature_dim: int | None = 16, **common: Unpack[CommonOptions]
    ) -> None:
        super().__init__(num_heads, head_dim, **common)
        if feature_dim is not None:
            check_integer("feature_dim", feature_dim)
        self.feature_dim = feature_dim
        self.query_map = None if feature_dim is None else HeadwiseLinear(num_heads, head_dim, feature_dim)
        self.key_map = None if feature_dim is None else HeadwiseLinear(self.num_kv_heads, head_dim, feature_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.head_dim**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        if self.query_map is not None and self.key_map is not None:
            q, k = self.query_map(q), self.key_map(k)
        return {"q": q, "k": k, "v": v, "feature_map": TaylorExp()}

    @property
    def num_features(self) -> int:
        return TaylorExp().num_features(self.feature_dim or self.head_dim)

    def flops(self, length: int) -> int:
        maps = [own for own in (self.query_map, self.key_map) if own is not None]
        return super().flops(length) + sum(own.flops(length) for own in maps)
