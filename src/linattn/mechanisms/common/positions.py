"""Where a token stands in its own sequence: padding does not count, packed sequences start anew."""

import torch
from torch import Tensor

from linattn.ops.positions import sequence_of_tokens


def token_positions(
    length: int,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    start: Tensor,
) -> tuple[Tensor, Tensor]:
    """Positions ``(B or 1, T)`` counted from ``start (N,)``, and ``start`` of what comes next.

    A padded token stands where the next real one will.
    """
    if key_mask is None and cu_seqlens is None:
        return start.unsqueeze(1) + torch.arange(length, device=start.device), start + length
    real = torch.ones(1, length, dtype=torch.long, device=start.device) if key_mask is None else key_mask.long()
    count = real.cumsum(1)  # real tokens up to and with each one, over the whole row
    before = count - real
    if cu_seqlens is None:
        total = count[:, -1] if length else torch.zeros_like(start)
        return start.unsqueeze(1) + before, start + total
    counted = torch.cat([count.new_zeros(1), count[0]])[cu_seqlens.long()]  # (N+1,) before each sequence
    own = sequence_of_tokens(cu_seqlens, length)
    return (before[0] + (start - counted[:-1])[own]).unsqueeze(0), start + counted.diff()
