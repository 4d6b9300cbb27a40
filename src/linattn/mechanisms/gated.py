"""Gated linear attention: the input decides what is forgotten."""

from typing import Any, Literal, Unpack

import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mechanisms.base import CommonOptions, LinearMechanism
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.shared.call import check_choice, compute_dtype

GATE_RANK = 16
GATE_TEMPERATURE = 16


@register_mechanism("gated", paper="arXiv:2312.06635", year=2023, uses_input=True)
class Gated(LinearMechanism):
    """Linear attention with a decay per channel or head that is computed from the layer's input.

    ``S_t = diag(alpha_t) S_{t-1} + k_t v_t^T``, ``o_t = S_t^T q_t / sqrt(D)``

    ``alpha_t = sigmoid(W_2 W_1 x_t + b)^(1/16)`` per key channel, W_1 of rank 16; or ``sigmoid(W x_t + b)^(1/16)``
    per head. When bidirectional, the same recurrence runs from both ends, with each token counted once.
    q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, x ``(B, T, input_dim)``, output ``(B, H, T, D)``; gates are
    per kv head. The paper's norm and output gate belong to the layer.

    Paper: Yang et al., Gated Linear Attention Transformers. State per kv head: ``D (D + 1)`` numbers.

    Args:
        gate: ``"channel"`` as in the paper, or ``"head"``, one scalar per head, which is faster.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("gated", num_heads=2, head_dim=8, causal=True)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v, x=torch.randn(1, 5, 16)).shape
        torch.Size([1, 2, 5, 8])
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        gate: Literal["channel", "head"] = "channel",
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(num_heads, head_dim, **common)
        check_choice("gate", gate, ("channel", "head"))
        self.gate = gate
        if gate == "channel":
            low_rank = nn.Linear(self.input_dim, GATE_RANK, bias=False)
            self.gate_map = nn.Sequential(low_rank, nn.Linear(GATE_RANK, self.num_kv_heads * head_dim))
        else:
            self.gate_map = nn.Sequential(nn.Linear(self.input_dim, self.num_kv_heads))

    def reset_parameters(self) -> None:
        for linear in self._linears():
            linear.reset_parameters()

    def log_decay(self, x: Tensor) -> Tensor:
        """``log alpha``: ``(B, H_kv, T, D)`` per channel, ``(B, H_kv, T)`` per head; fp32 or fp64."""
        gates = self.gate_map(x)
        log_alpha = F.logsigmoid(gates.to(compute_dtype(gates))) / GATE_TEMPERATURE
        if self.gate == "head":
            return log_alpha.transpose(1, 2)
        return log_alpha.unflatten(2, (self.num_kv_heads, self.head_dim)).transpose(1, 2)

    def arguments(self, q: Tensor, k: Tensor, v: Tensor, *, x: Tensor | None) -> dict[str, Any]:
        log_decay = self.log_decay(self.input_of(x, k))
        # In either direction the recurrence decays before it writes: decay_index is "query".
        return {"q": q * self.head_dim**-0.5, "k": k, "v": v, "log_decay": log_decay, "normalizer": None,
                "decay_index": "query"}  # fmt: skip

    def flops(self, length: int) -> int:
        """A bidirectional decay takes two sweeps; the gates are computed once."""
        gates = sum(2 * length * linear.weight.numel() for linear in self._linears())
        return super().flops(length) * (1 if self.causal else 2) + gates

    def _linears(self) -> list[nn.Linear]:
        return [module for module in self.gate_map if isinstance(module, nn.Linear)]
