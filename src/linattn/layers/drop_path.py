"""Stochastic depth."""

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """Stochastic depth: drops a residual branch for whole samples in training and scales the others to keep the mean.

    Example:
        >>> import torch
        >>> from linattn.layers import DropPath
        >>> x = torch.ones(4, 3, 2)
        >>> bool((DropPath(0.5).eval()(x) == x).all())
        True
    """

    keep: Tensor | None

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("keep", None, persistent=False)
        self.rate = rate

    @property
    def rate(self) -> float:
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise ValueError(f"rate must be a number in [0, 1), got {rate!r}")
        self._rate = float(rate)
        if self.keep is not None:
            self.keep.fill_(1 - rate)

    def rate_to_tensor(self, device: torch.device) -> None:
        """Read the rate from a tensor from now on, so that compiled code is the same for all rates, including 0."""
        self.keep = torch.tensor(1 - self.rate, dtype=torch.float32, device=device)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        shape = (x.shape[0], *[1] * (x.ndim - 1))
        if self.keep is not None:
            return x * (torch.rand(shape, device=x.device) < self.keep).to(x.dtype).div(self.keep)
        if self.rate == 0:
            return x
        keep = 1 - self.rate
        return x * x.new_empty(shape).bernoulli_(keep).div_(keep)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"
