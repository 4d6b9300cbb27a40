"""Norms by name."""

from torch import Tensor, nn

NORMS = ("layer", "rms")
OUTPUT_NORMS = (*NORMS, "head_layer", "head_rms")
EPS = 1e-6


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` that also takes inputs of lower precision than its weight, as autocast gives them.

    PyTorch has no fused kernel for mixed dtypes: it would warn and compute in several steps.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def create_norm(kind: str, width: int) -> nn.Module:
    return nn.LayerNorm(width, eps=EPS) if kind == "layer" else RMSNorm(width, eps=EPS)


class OutputNorm(nn.Module):
    """Norm of the output of attention ``(B, T, H D)``, before the gate.

    ``"layer"``, ``"rms"``: over all channels (NaLaFormer has ``"layer"``); ``"head_layer"``, ``"head_rms"``: over the
    channels of each head separately, with one weight per channel that all heads share (RetNet, GLA).
    """

    def __init__(self, num_heads: int, head_dim: int, kind: str = "layer") -> None:
        super().__init__()
        self.by_head = kind.startswith("head_")
        self.num_heads = num_heads
        self.norm = create_norm(kind.removeprefix("head_"), head_dim if self.by_head else num_heads * head_dim)

    def forward(self, o: Tensor) -> Tensor:
        if not self.by_head:
            return self.norm(o)
        return self.norm(o.unflatten(-1, (self.num_heads, -1))).flatten(-2)
