"""The memory order of results: that of the tensor whose tokens they belong to."""

import torch
from torch import Tensor


def is_token_major(x: Tensor) -> bool:
    """Whether the heads of one token lie together in ``x (.., H, T, D)``, as a projection leaves them."""
    return x.stride(-2) > x.stride(-3)


def side_by_side(x: Tensor) -> int:
    """How many heads of a token lie together in a result of :func:`like_tokens`: all or one."""
    return x.shape[1] if is_token_major(x) else 1


def like_tokens(
    x: Tensor, width: int, dtype: torch.dtype | None = None, copies: tuple[int, ...] = (), *, heads: int | None = None
) -> Tensor:
    """New memory ``(*copies, B, H, T, width)`` for numbers of the tokens of ``x (B, H, T, D)``, in the order of x.

    If x is token-major the result is so too, else it is contiguous. So the next operation (heads are joined, or a
    projection's gradient is taken) has nothing to copy. heads: H, if it is not that of x.

    The result has these strides itself and is not a view: autograd forbids changing in place what one of its functions
    returned as a view.
    """
    B, H, T, _ = x.shape
    H = H if heads is None else heads
    shape = *copies, B, H, T, width
    if not is_token_major(x):
        return x.new_empty(shape, dtype=dtype)
    size = T * H * width
    return x.new_empty_strided(shape, (*(B * size for _ in copies), size, width, H * width, 1), dtype=dtype)
