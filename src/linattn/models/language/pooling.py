"""Pooling: one vector for each sequence."""

import torch
from torch import Tensor

POOLINGS = ("last", "mean")


def pool(hidden: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """Pool ``(B, T, C)`` to ``(B, C)``: the last real token, or the mean of real ones; ``mask (B, T)``, 1 = real."""
    if mask is None:
        return hidden[:, -1] if pooling == "last" else hidden.mean(1)
    real = mask.bool()
    if pooling == "mean":
        kept = hidden.masked_fill(~real.unsqueeze(-1), 0)
        return kept.sum(1) / real.sum(1, keepdim=True).clamp(min=1).to(hidden.dtype)
    last = (torch.arange(real.shape[1], device=real.device) * real).argmax(1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), last]
