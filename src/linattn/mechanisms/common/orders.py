"""Orders of the tokens of an image plane, for mechanisms whose decay runs along a line."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from linattn.mechanisms.base import Call
from linattn.ops.shared.checks import check_values


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
        found: Tensor = _Spread.apply(x, self.tokens, self.places)
        return found

    def gather(self, x: Tensor) -> Tensor:
        """Sum the two places of each token, ``(B, H, 2 T, ...)`` to ``(B, H, T, ...)``: the transpose of ``spread``."""
        found: Tensor = _Gather.apply(x, self.tokens, self.places)
        return found


class _Spread(Function):
    """Indexing by ``tokens``. PyTorch would sort indices for the gradient; here ``places`` is the known inverse."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        return x.index_select(2, tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Orders(*ctx.saved_tensors).gather(grad), None, None


class _Gather(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        return x.index_select(2, places).unflatten(2, (2, -1)).sum(2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Orders(*ctx.saved_tensors).spread(grad), None, None


def snake(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Boustrophedon order ``(rows * columns,)`` and its inverse: row by row, every other row backwards.

    Neighbours in the order are neighbours in the plane. The order is its own inverse.
    """
    token = torch.arange(rows * columns, device=device)
    row, column = token // columns, token % columns
    order = torch.where(row % 2 == 1, row * columns + (columns - 1) - column, token)
    return order, order


def snake_transposed(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Boustrophedon order and its inverse, column by column."""
    along, _ = snake(columns, rows, device)
    token = torch.arange(rows * columns, device=device)
    return along % rows * columns + along // rows, along[token % columns * rows + token // columns]


def plane_orders(x: Tensor, call: Call, num_prefix_tokens: int) -> Orders:
    """Both snake orders over the plane ``call.spatial_shape``, for the tokens of ``x (B, H, T, D)``.

    Tokens before the plane keep their places. Packed sequences have one plane each.
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

    def of_all(plane: Tensor) -> Tensor:
        return (start + torch.cat([prefix, num_prefix_tokens + plane])).flatten()

    (one, its_inverse), (two, inverse) = (f(rows, columns, x.device) for f in (snake, snake_transposed))
    tokens, places = torch.cat([of_all(one), of_all(two)]), torch.cat([of_all(its_inverse), T + of_all(inverse)])
    return Orders(tokens, places)
