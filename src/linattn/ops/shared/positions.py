"""Where tokens lie in a packed row: index arithmetic on ``cu_seqlens`` that never leaves the device."""

import torch
from torch import Tensor


def sequence_of_tokens(cu_seqlens: Tensor, length: int) -> Tensor:
    """The sequence each of ``length`` packed tokens belongs to, ``(T,)`` int64; empty sequences own none."""
    tokens = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)
