"""Positions of tokens in their own sequence: padding does not count, and each packed sequence starts anew."""

import torch
from torch import Tensor

from linattn.ops.shared.packing import sequence_of_tokens


def token_positions(
    length: int,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    start: Tensor,
) -> tuple[Tensor, Tensor]:
    """Positions ``(B or 1, T)`` counted from ``start (N,)``, and the ``start`` for the tokens that come next.

    A padded token has the position of the next real one.
    """
    if key_mask is None and cu_seqlens is None:
        return start.unsqueeze(1) + torch.arange(length, device=start.device), start + length
    real = torch.ones(1, length, dtype=torch.long, device=start.device) if key_mask is None else key_mask.long()
    count = real.cumsum(1)  # real tokens up to and including each token, over the whole row
    before = count - real
    if cu_seqlens is None:
        total = count[:, -1] if length else torch.zeros_like(start)
        return start.unsqueeze(1) + before, start + total
    counted = torch.cat([count.new_zeros(1), count[0]])[cu_seqlens.long()]  # (N+1,) before each sequence
    own = sequence_of_tokens(cu_seqlens, length)
    return (before[0] + (start - counted[:-1])[own]).unsqueeze(0), start + counted.diff()
