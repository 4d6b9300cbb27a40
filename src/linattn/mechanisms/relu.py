"""Linear attention with ReLU features."""

from typing import Any

from torch import Tensor

from linattn.mechanisms.base import LinearMechanism
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.feature_maps import Relu as ReluMap


@register_mechanism("relu", paper="arXiv:2205.14756", year=2022)
class Relu(LinearMechanism):
    """Linear attention with ``max(x, 0)`` features.

    ``o_t = sum_s phi(q_t).phi(k_s) v_s / (sum_s phi(q_t).phi(k_s) + 1e-6)``, ``phi(x) = max(x, 0)``

    q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, output ``(B, H, T, D)``. A query that meets no key in a
    common positive channel gives 0.

    Paper: Cai et al., EfficientViT. State per kv head: ``D (D + 1)`` numbers.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("relu", num_heads=2, head_dim=8)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v).shape
        torch.Size([1, 2, 5, 8])
    """

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        return {"q": q, "k": k, "v": v, "feature_map": ReluMap()}

    def truncated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    @property
    def num_features(self) -> int:
        return self.head_dim
