"""Hedgehog: learned features that imitate softmax's spikes."""

from typing import Any, Unpack

import torch
from torch import Tensor

from linattn.mechanisms.base import CommonOptions, LinearMechanism
from linattn.mechanisms.common.linear import HeadwiseLinear
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.maps import SoftmaxPair


@register_mechanism("hedgehog", paper="arXiv:2402.04347", year=2024)
class Hedgehog(LinearMechanism):
    """Linear attention with learned features ``[softmax(Wx), softmax(-Wx)]``.

    ``o_t = sum_s phi_q(q_t).phi_k(k_s) v_s / sum_s phi_q(q_t).phi_k(k_s)``,
    ``phi(x) = [softmax(W x), softmax(-W x)]`` over the channels of a head

    q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, output ``(B, H, T, D)``. W is ``(D, D)``, one per head for
    queries and one per kv head for keys, and starts as the identity.

    Paper: Zhang et al., The Hedgehog and the Porcupine. State per kv head: ``2 D (D + 1)`` numbers.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("hedgehog", num_heads=2, head_dim=8, causal=True)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v).shape, mechanism.num_parameters
        (torch.Size([1, 2, 5, 8]), 256)
    """

    def __init__(self, num_heads: int, head_dim: int, **common: Unpack[CommonOptions]) -> None:
        super().__init__(num_heads, head_dim, **common)
        self.query_map = HeadwiseLinear(num_heads, head_dim, head_dim)
        self.key_map = HeadwiseLinear(self.num_kv_heads, head_dim, head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset W to the identity: the features are then ``[softmax(x), softmax(-x)]`` of plain queries and keys."""
        with torch.no_grad():
            for own in (self.query_map, self.key_map):
                own.weight.copy_(torch.eye(self.head_dim))

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        return {"q": self.query_map(q), "k": self.key_map(k), "v": v, "feature_map": SoftmaxPair()}

    @property
    def num_features(self) -> int:
        return SoftmaxPair().num_features(self.head_dim)

    def flops(self, length: int) -> int:
        return super().flops(length) + self.query_map.flops(length) + self.key_map.flops(length)
