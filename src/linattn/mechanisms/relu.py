"""Linear attention with ReLU features."""

from typing import Any, Unpack

from torch import Tensor

from linattn.mechanisms.base import CommonOptions, LinearMechanism
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.maps import Relu as ReluMap
from linattn.ops.shared.call import check_number

EPS = 1e-6
LEAST_EPS = 1e-30  # gradients divide by eps: with a much smaller one they would leave the range of fp32


@register_mechanism("relu", paper="arXiv:2205.14756", year=2022)
class Relu(LinearMechanism):
    """Linear attention with ``max(x, 0)`` features.

    ``o_t = sum_s phi(q_t).phi(k_s) v_s / (sum_s phi(q_t).phi(k_s) + eps)``, ``phi(x) = max(x, 0)``

    q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, output ``(B, H, T, D)``. A query that has no positive channel in
    common with any key gives 0.

    Paper: Cai et al., EfficientViT. State per kv head: ``D (D + 1)`` numbers.

    Args:
        eps: added to the denominator, at least 1e-30, so that a query without such a channel gives 0 / eps = 0.
            EfficientViT's code has 1e-15. Next to small features the default is not small and draws outputs towards 0.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("relu", num_heads=2, head_dim=8)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v).shape
        torch.Size([1, 2, 5, 8])
    """

    def __init__(self, num_heads: int, head_dim: int, *, eps: float = EPS, **common: Unpack[CommonOptions]) -> None:
        super().__init__(num_heads, head_dim, **common)
        check_number("eps", eps, least=LEAST_EPS)
        self.eps = eps

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        return {"q": q, "k": k, "v": v, "feature_map": ReluMap(), "eps": self.eps}

    def truncated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k
