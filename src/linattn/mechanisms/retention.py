"""Retention: a fixed decay per head."""

from typing import Any, Unpack

import torch
from torch import Tensor

from linattn.mechanisms.base import CommonOptions, LinearMechanism
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.shared.call import check_choice, compute_dtype
from linattn.ops.shared.types import Normalizer


@register_mechanism("retention", paper="arXiv:2307.08621", year=2023)
class Retention(LinearMechanism):
    """Linear attention without features, with a fixed exponential decay per head.

    ``o_t = sum_s gamma_h^|t - s| (q_t . k_s / sqrt(D)) v_s / n_t``, ``gamma_h = 1 - 2^(-5 - h)``, h = 0, 1, ...

    The sum runs over ``s <= t`` when causal, otherwise over all tokens. q ``(B, H, T, D)``, k and v
    ``(B, H_kv, T, D)``, output ``(B, H, T, D)``; h is the index of the kv head. The paper's rotary positions, group
    norm and output gate belong to the layer.

    Paper: Sun et al., Retentive Network. State per kv head: ``D (D + 1)`` numbers.

    Args:
        normalizer: None (n = 1; the paper's group norm follows in the layer), or ``"abs_max_one"``
            (``n_t = max(|row sum|, 1)``, as in the paper's parallel form).

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("retention", num_heads=2, head_dim=8, causal=True)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v).shape
        torch.Size([1, 2, 5, 8])
    """

    def __init__(
        self, num_heads: int, head_dim: int, *, normalizer: Normalizer = None, **common: Unpack[CommonOptions]
    ) -> None:
        super().__init__(num_heads, head_dim, **common)
        check_choice("normalizer", normalizer, (None, "abs_max_one"))
        self.normalizer = normalizer

    def log_decay(self, like: Tensor) -> Tensor:
        """``log gamma (H_kv,)``; computed in every call, so that an fp64 call has fp64 decays."""
        heads = torch.arange(self.num_kv_heads, device=like.device, dtype=compute_dtype(like))
        return torch.log1p(-torch.exp2(-5 - heads))

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        q = q * self.head_dim**-0.5
        return {"q": q, "k": k, "v": v, "log_decay": self.log_decay(q), "normalizer": self.normalizer}

    def flops(self, length: int) -> int:
        """Twice those of a causal call when bidirectional, since the decay then takes two sweeps."""
        return super().flops(length) * (1 if self.causal else 2)
