"""The output gate: a factor on a token's attention, computed from the token itself."""

import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = ("linear", "silu")


class OutputGate(nn.Module):
    """Output gate ``o * act(W x + b)`` for o ``(B, T, width)`` and x ``(B, T, dim)``.

    ``activation`` is ``"linear"``, none (PolaFormer, RALA), or ``"silu"`` (NaLaFormer, RetNet).
    """

    def __init__(self, dim: int, width: int, activation: str = "linear") -> None:
        super().__init__()
        self.activation = activation
        self.proj = nn.Linear(dim, width)

    def forward(self, o: Tensor, x: Tensor) -> Tensor:
        gate = self.proj(x)
        return o * (F.silu(gate) if self.activation == "silu" else gate)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
