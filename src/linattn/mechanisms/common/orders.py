"""Orders in which the tokens of an image plane can be walked, for mechanisms whose decay follows a line."""

import torch
from torch import Tensor

from linattn.mechanisms.base import Call
from linattn.ops.checks import check_values


def snake(rows: int, columns: int, device: torch.device) -> Tensor:
    """``(rows * columns,)``: row by row, every other row backwards, so that neighbours in the order touch."""
    plane = torch.arange(rows * columns, device=device).view(rows, columns)
    backwards = (torch.arange(rows, device=device) % 2 == 1).unsqueeze(1)
    return torch.where(backwards, plane.flip(1), plane).flatten()


def snake_transposed(rows: int, columns: int, device: torch.device) -> Tensor:
    """The same, column by column."""
    along = snake(columns, rows, device)
    return along % rows * columns + along // rows


def plane_orders(x: Tensor, call: Call, num_prefix_tokens: int) -> tuple[Tensor, Tensor]:
    """Both snakes over ``call.spatial_shape``, ``(T,)`` each: ``order[n]`` is the token that stands at place n.

    ``x (B, H, T, D)``. Tokens before the plane keep their places. Packed sequences have one plane each.
    """
    shape, T = call.spatial_shape, x.shape[2]
    if not isinstance(shape, tuple) or len(shape) != 2 or not all(isinstance(s, int) and s >= 1 for s in shape):
        raise ValueError(f"spatial_shape must be a pair of integers >= 1 (rows, columns), got {shape!r}")
    rows, columns = shape
    own = num_prefix_tokens + rows * columns
    images = 1 if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    fits = images * own == T
    if fits and call.cu_seqlens is not None and check_values(x, None):
        fits = bool((call.cu_seqlens.diff() == own).all())
    if not fits:
        before = f" after {num_prefix_tokens} prefix tokens" if num_prefix_tokens else ""
        raise ValueError(f"spatial_shape {shape} must hold all tokens of a sequence{before}, got T = {T} in {images}")
    prefix = torch.arange(num_prefix_tokens, device=x.device)
    start = torch.arange(images, device=x.device).unsqueeze(1) * own
    both = (torch.cat([prefix, num_prefix_tokens + f(rows, columns, x.device)]) for f in (snake, snake_transposed))
    one, two = ((start + order).flatten() for order in both)
    return one, two
