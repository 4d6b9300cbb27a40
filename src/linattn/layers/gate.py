"""The output gate: what of a token's attention passes on is decided by the token itself."""

import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = ("linear", "silu")


class OutputGate(nn.Module):
    """``o * act(W x + b)``: o ``(B, T, W)``, x ``(B, T, C)``.

    ``"linear"``: no activation (PolaFormer, RALA); ``"silu"`` (NaLaFormer, RetNet).
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
