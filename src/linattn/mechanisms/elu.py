"""Linear attention with ELU features."""

from typing import Any

from torch import Tensor

from linattn.mechanisms.base import LinearMechanism
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.maps import EluPlusOne


@register_mechanism("elu", paper="arXiv:2006.16236", year=2020)
class Elu(LinearMechanism):
    """Linear attention with ``elu(x) + 1`` features.

    ``o_t = sum_s phi(q_t).phi(k_s) v_s / sum_s phi(q_t).phi(k_s)``, ``phi(x) = elu(x) + 1 > 0``

    q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, output ``(B, H, T, D)``.

    Paper: Katharopoulos et al., Transformers are RNNs. State per kv head: ``D (D + 1)`` numbers.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("elu", num_heads=2, head_dim=8)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v).shape
        torch.Size([1, 2, 5, 8])
    """

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        return {"q": q, "k": k, "v": v, "feature_map": EluPlusOne()}
