"""Assigns the examples of a finite set to batches."""

import torch
from torch import Tensor

from linattn.support.seeds import stream


def shuffled_batch(total: int, batch_size: int, seed: int, step: int) -> Tensor:
    """Indices ``(batch_size,)`` of batch ``step``: the set shuffled anew for each epoch, one epoch after another.

    Batches continue across the end of an epoch, so every batch is full and every epoch has each example once.

    Example:
        >>> first = [shuffled_batch(6, 4, seed=0, step=step) for step in range(3)]
        >>> sorted(torch.cat(first)[:6].tolist()), sorted(torch.cat(first)[6:].tolist())
        ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    """
    begin = step * batch_size
    epochs = range(begin // total, (begin + batch_size - 1) // total + 1)
    order = torch.cat([torch.randperm(total, generator=stream("order", seed, epoch)) for epoch in epochs])
    offset = begin - epochs[0] * total
    return order[offset : offset + batch_size]
