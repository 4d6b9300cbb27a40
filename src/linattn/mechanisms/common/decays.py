"""Learned decays that cannot exceed 1, and the orders of an image's tokens along which they run."""

import math
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from linattn.mechanisms.base import Call
from linattn.mechanisms.common.tokens import plane_of
from linattn.ops.shared.call import compute_dtype

SHORTEST_STEP, LONGEST_STEP = 0.001, 0.1


class HeadDecay(nn.Module):
    """Decay per head. ``log lambda``: ``log sigmoid(a) (H,)``, or of an input ``log sigmoid(W x + b) (B, H, T)``.

    The result is fp32 or fp64.
    """

    def __init__(self, num_heads: int, head_dim: int, input_dim: int | None) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.empty(num_heads)) if input_dim is None else None
        self.gate = None if input_dim is None else nn.Linear(input_dim, num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.logit is not None:
            nn.init.normal_(self.logit)
        if self.gate is not None:
            nn.init.trunc_normal_(self.gate.weight, std=0.02)
            nn.init.zeros_(self.gate.bias)

    def forward(self, x: Tensor | None) -> Tensor:
        if self.gate is None:
            assert self.logit is not None
            return F.logsigmoid(self.logit.to(compute_dtype(self.logit)))
        assert x is not None
        logits = self.gate(x)
        return F.logsigmoid(logits.to(compute_dtype(logits))).transpose(1, 2)


class ChannelDecay(nn.Module):
    """Decay per channel. ``log lambda``: ``B (H, D)``, or of an input ``B (1 + sigmoid(W x + b)) (B, H, T, D)``.

    The result is fp32 or fp64. ``B = -exp(theta)`` is negative for any theta. It starts at HiPPO's real diagonal
    ``-(n + 1)``, n = 0, 1, ..., times a step per head, from 0.001 to 0.1.
    """

    def __init__(self, num_heads: int, head_dim: int, input_dim: int | None) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.empty(num_heads, head_dim))
        self.gate = None if input_dim is None else nn.Linear(input_dim, num_heads * head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        (heads, channels), device = self.log_rate.shape, self.log_rate.device
        # The device is named for both: transformers loads models on the meta device, where linspace is an exception.
        steps = torch.linspace(math.log(SHORTEST_STEP), math.log(LONGEST_STEP), heads, device=device)
        with torch.no_grad():
            self.log_rate.copy_(steps[:, None] + torch.arange(1, channels + 1, device=device).log())
        if self.gate is not None:
            nn.init.normal_(self.gate.weight, std=0.1)
            nn.init.zeros_(self.gate.bias)

    def forward(self, x: Tensor | None) -> Tensor:
        rate = -self.log_rate.to(compute_dtype(self.log_rate)).exp()
        if self.gate is None:
            return rate
        assert x is not None
        logits = self.gate(x).unflatten(2, self.log_rate.shape).transpose(1, 2)
        return rate.unsqueeze(1) * (1 + logits.to(rate.dtype).sigmoid())


class Orders(NamedTuple):
    """Two orders of the same T tokens, laid out one after the other.

    Attributes:
        tokens: ``(2 T,)``, the token at each place of the first order, then of the second.
        places: ``(2 T,)``, the place of each token in the first order, then in the second, where places from T to
            2 T - 1 are those of the second.
    """

    tokens: Tensor
    places: Tensor

    def spread(self, x: Tensor) -> Tensor:
        """Copy tokens ``(B, H, T, ...)`` to their places in both orders ``(B, H, 2 T, ...)``."""
        return cast(Tensor, _Reorder.apply(x, *self, True))

    def gather(self, x: Tensor) -> Tensor:
        """Sum the two places of each token, ``(B, H, 2 T, ...)`` to ``(B, H, T, ...)``: the transpose of ``spread``."""
        return cast(Tensor, _Reorder.apply(x, *self, False))


class _Reorder(Function):
    """Spread or gather. PyTorch would sort the indices for the gradient; here each is the inverse of the other."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, tokens: Tensor, places: Tensor, spread: bool) -> Tensor:
        return x.index_select(2, tokens) if spread else x.index_select(2, places).unflatten(2, (2, -1)).sum(2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:3])
        ctx.spread = inputs[3]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Reorder.apply(grad, *ctx.saved_tensors, not ctx.spread), None, None, None


def snake(rows: int, columns: int, device: torch.device) -> Tensor:
    """Boustrophedon order ``(rows * columns,)``: row by row, every other row backwards.

    Neighbours in the order are neighbours in the plane.
    """
    token = torch.arange(rows * columns, device=device)
    row, column = token // columns, token % columns
    return torch.where(row % 2 == 1, row * columns + (columns - 1) - column, token)


def plane_orders(x: Tensor, call: Call, num_prefix_tokens: int) -> Orders:
    """Snake orders by rows and by columns over the plane ``call.spatial_shape``, for the tokens of ``x (B, H, T, D)``.

    Tokens before the plane keep their places. Packed sequences have one plane each.
    """
    rows, columns, images = plane_of(x, call, num_prefix_tokens)
    T, device = x.shape[2], x.device
    along = snake(columns, rows, device)
    both = torch.stack([snake(rows, columns, device), along % rows * columns + along // rows])  # (2, rows columns)
    prefix = torch.arange(num_prefix_tokens, device=device).expand(2, -1)
    start = torch.arange(images, device=device).unsqueeze(1) * (T // images)
    tokens = (start + torch.cat([prefix, num_prefix_tokens + both], dim=1).unsqueeze(1)).flatten(1)  # (2, T)
    numbers = torch.arange(2 * T, device=device).unflatten(0, (2, T))
    return Orders(tokens.flatten(), torch.empty_like(tokens).scatter_(1, tokens, numbers).flatten())
