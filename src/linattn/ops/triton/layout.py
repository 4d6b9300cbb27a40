"""In which order results lie in memory: in that of the tensor whose tokens they belong to."""

import torch
from torch import Tensor


def is_token_major(x: Tensor) -> bool:
    """Whether the heads of one token lie together in ``x (.., H, T, D)``, as a projection leaves them."""
    return x.stride(-2) > x.stride(-3)


def side_by_side(x: Tensor) -> int:
    """Heads of a token that lie together in a result of :func:`like_tokens`: all of them, or one."""
    return x.shape[1] if is_token_major(x) else 1


def like_tokens(
    x: Tensor, width: int, dtype: torch.dtype | None = None, copies: tuple[int, ...] = (), *, heads: int | None = None
) -> Tensor:
    """New memory ``(*copies, B, H, T, width)`` for what belongs to the tokens of ``x (B, H, T, D)``, in the order of x.

    Rows of a token after those of another where x has them so, else contiguous: what comes next (heads are joined, or
    a projection's gradient is taken) has nothing to copy. heads: H, where it is not that of x.

    By its strides, not as a view: autograd forbids to change in place what one of its functions returned as a view.
    """
    B, H, T, _ = x.shape
    H = H if heads is None else heads
    shape = *copies, B, H, T, width
    if not is_token_major(x):
        return x.new_empty(shape, dtype=dtype)
    size = T * H * width
    return x.new_empty_strided(shape, (*(B * size for _ in copies), size, width, H * width, 1), dtype=dtype)
