"""Stochastic depth."""

from torch import Tensor, nn


class DropPath(nn.Module):
    """Drops a residual branch for whole samples in training, and scales the others so that the mean stays.

    Example:
        >>> import torch
        >>> from linattn.layers import DropPath
        >>> x = torch.ones(4, 3, 2)
        >>> bool((DropPath(0.5).eval()(x) == x).all())
        True
    """

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise ValueError(f"rate must be a number in [0, 1), got {rate!r}")
        self.rate = float(rate)

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0 or not self.training:
            return x
        keep = 1 - self.rate
        return x * x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(keep).div_(keep)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"
