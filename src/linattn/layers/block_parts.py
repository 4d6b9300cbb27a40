"""The other parts of a block: convolutional positions, the feed-forward part, and what stands on residual branches."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.layers.plane import check_plane, from_plane, to_plane, wipe


class ConvolutionalPosition(nn.Module):
    """Conditional position encoding: ``x + conv(x)`` with a depthwise convolution over the plane.

    x ``(B, T, C)`` to ``(B, T, C)``; prefix tokens pass unchanged. It stands before the norm of a block. Paper: Chu et
    al., Conditional Positional Encodings (CPVT), as used by NaLaFormer and RALA.

    Example:
        >>> import torch
        >>> from linattn.layers import ConvolutionalPosition
        >>> ConvolutionalPosition(8)(torch.randn(2, 12, 8), spatial_shape=(3, 4)).shape
        torch.Size([2, 12, 8])
    """

    def __init__(self, dim: int, kernel_size: int = 3, num_prefix_tokens: int = 0) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.conv = nn.Conv2d(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)

    def forward(self, x: Tensor, *, spatial_shape: tuple[int, int] | None, key_mask: Tensor | None = None) -> Tensor:
        check_plane(x.shape[1], spatial_shape, self.num_prefix_tokens, "a convolutional position")
        assert spatial_shape is not None
        plane = to_plane(wipe(x, key_mask), spatial_shape, self.num_prefix_tokens)
        return x + from_plane(self.conv(plane), self.num_prefix_tokens)


class Mlp(nn.Module):
    """Feed-forward part of a block: ``W_2 y`` with ``y = gelu(W_1 x)``.

    With ``conv=True`` it is ``W_2 (y + conv(y))`` with a depthwise 3 x 3 convolution over the plane (RALA).

    Example:
        >>> import torch
        >>> from linattn.layers import Mlp
        >>> Mlp(8, 32)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, dim: int, hidden_dim: int, *, conv: bool = False, num_prefix_tokens: int = 0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.conv = ConvolutionalPosition(hidden_dim, num_prefix_tokens=num_prefix_tokens) if conv else None
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor, *, spatial_shape: tuple[int, int] | None = None) -> Tensor:
        x = F.gelu(self.fc1(x))
        if self.conv is not None:
            x = self.conv(x, spatial_shape=spatial_shape)
        return self.fc2(x)


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
