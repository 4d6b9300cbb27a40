"""LayerScale: a learned factor per channel on a residual branch."""

import torch
from torch import Tensor, nn


class LayerScale(nn.Module):
    """LayerScale: ``x * gamma`` with a learned gamma ``(C,)``.

    Paper: Touvron et al., Going deeper with Image Transformers (CaiT).

    Example:
        >>> import torch
        >>> from linattn.layers import LayerScale
        >>> LayerScale(2, 0.5)(torch.ones(1, 2))
        tensor([[0.5000, 0.5000]], grad_fn=<MulBackward0>)
    """

    def __init__(self, dim: int, init: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), float(init)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma
