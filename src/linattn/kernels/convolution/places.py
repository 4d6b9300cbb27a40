"""The gap-free rows of a convolution over masked or packed tokens, as tables, made without waiting for the device.

Slots and places are explained in ``kernels.slots``.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.shared.packing import sequence_of_tokens


class Places(NamedTuple):
    """Places of all slots, and of the last W-1 slots of each sequence."""

    table: Tensor  # (B, slots) int32
    final: Tensor  # (B, n (W-1)) int64


def lay_out(x: Tensor, past: int, key_mask: Tensor | None, cu_seqlens: Tensor | None) -> Places:
    """Lay out rows in which ``past`` = W-1 slots before each of the n sequences hold its earlier inputs."""
    B, T, _ = x.shape
    device = x.device
    real = torch.ones(B, T, dtype=torch.bool, device=device) if key_mask is None else key_mask
    before = F.pad(real.cumsum(1), (1, 0))  # real tokens before each token, and at the end all of them
    if cu_seqlens is None:
        number = sequence = torch.zeros(1, dtype=torch.int64, device=device)
        starts, ends = before[:, :1], before[:, -1:]
    else:
        number = torch.arange(cu_seqlens.shape[0] - 1, device=device)
        sequence = sequence_of_tokens(cu_seqlens, T)
        starts, ends = before[:, cu_seqlens[:-1]], before[:, cu_seqlens[1:]]
    n, window = number.shape[0], torch.arange(past, device=device)
    slots = T + n * past + 1  # the last slot is for masked tokens and stays empty
    tokens = torch.where(real, before[:, :-1] + (sequence + 1) * past, slots - 1)
    initial = ((starts + number * past).unsqueeze(-1) + window).flatten(1)
    final = ((ends + number * past).unsqueeze(-1) + window).flatten(1)
    table = torch.full((B, slots), -1, dtype=torch.int64, device=device)
    table = table.scatter(1, tokens, torch.arange(T, device=device).expand(B, T))
    table = table.scatter(1, initial, -2 - torch.arange(B * n * past, device=device).view(B, n * past))
    table = torch.cat([table[:, :-1], torch.full_like(table[:, :1], -1)], dim=1)
    return Places(table.to(torch.int32), table.gather(1, final))


def last_inputs(x: Tensor, initial: Tensor | None, past: int, n: int, places: Places | None) -> Tensor:
    """The last W-1 real inputs of each sequence, ``(n, W-1, C)`` in the dtype of x."""
    B, T, C = x.shape
    before = x.new_zeros(n, past, C) if initial is None else initial.to(x.dtype)
    if T == 0:
        return before.clone()
    if places is None:
        row = torch.cat([before, x[:, max(0, T - past) :]], dim=1)
        return row[:, row.shape[1] - past :].contiguous()
    if past == 0:
        return before.clone()
    rows = torch.arange(B, device=x.device).unsqueeze(1)
    tokens = x[rows, places.final.clamp(min=0)].view(n, past, C)
    earlier = before.reshape(n * past, C)[(-2 - places.final).clamp(min=0)].view(n, past, C)
    return torch.where((places.final >= 0).view(n, past, 1), tokens, earlier)
