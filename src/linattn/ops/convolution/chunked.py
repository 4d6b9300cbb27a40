"""The causal depthwise convolution for all tokens at once: one multiply-add of a shifted row per tap.

Gaps and boundaries are removed by moving tokens, not by testing each tap: real tokens are laid side by side, each
sequence after the W-1 inputs that precede it. In that row the plain convolution is right everywhere. The row's
length depends only on shapes, so that nothing waits for the device and one compiled graph serves every mask.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.shared.packing import sequence_of_tokens


def convolve(
    x: Tensor, weight: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """Convolve all tokens at once; arguments and results as in the reference form."""
    past = initial.shape[1]
    if key_mask is None and cu_seqlens is None:
        row = torch.cat([initial, x], dim=1)
        return _convolve_row(row, weight), row[:, row.shape[1] - past :]
    places = _lay_out(x, key_mask, cu_seqlens, past)
    B, T, C = x.shape
    slots = torch.cat([places.initial, places.tokens], dim=1).flatten()
    inputs = torch.cat([initial.reshape(B, places.initial.shape[1], C), x], dim=1).flatten(0, 1)
    row = x.new_zeros(B * places.length, C).index_copy(0, slots, inputs)
    output = _convolve_row(row.view(B, -1, C), weight)
    # Each row of the output is shorter by the first W-1 slots than the row of the batch.
    output_rows = places.tokens - past * (1 + torch.arange(B, device=x.device).unsqueeze(1))
    output = output.flatten(0, 1).index_select(0, output_rows.flatten()).view(B, T, C)
    if key_mask is not None:
        output = output.masked_fill(~key_mask.unsqueeze(-1), 0)
    return output, row.index_select(0, places.final.flatten()).view(initial.shape)


def _convolve_row(row: Tensor, weight: Tensor) -> Tensor:
    """``(B, S, C)`` to ``(B, S - W + 1, C)``, without padding."""
    length = row.shape[1] - weight.shape[1] + 1
    output = row[:, :length] * weight[:, 0]
    for j in range(1, weight.shape[1]):
        output = torch.addcmul(output, row[:, j : j + length], weight[:, j])
    return output


class _Places(NamedTuple):
    """Slots of the gap-free rows, numbered through the batch, and the length of a row."""

    tokens: Tensor  # (B, T); masked tokens share the unused last slot of their row
    initial: Tensor  # (B, n (W-1)): the past of the n sequences of each row
    final: Tensor  # (B, n (W-1)): the last W-1 slots of each sequence
    length: int


def _lay_out(x: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, past: int) -> _Places:
    B, T, _ = x.shape
    real = torch.ones(B, T, dtype=torch.bool, device=x.device) if key_mask is None else key_mask
    before = F.pad(real.cumsum(1), (1, 0))  # real tokens before each token, and at the end all of them
    if cu_seqlens is None:
        number = sequence = torch.zeros(1, dtype=torch.int64, device=x.device)
        starts, ends = before[:, :1], before[:, -1:]
    else:
        number = torch.arange(cu_seqlens.shape[0] - 1, device=x.device)
        sequence = sequence_of_tokens(cu_seqlens, T)
        starts, ends = before[:, cu_seqlens[:-1]], before[:, cu_seqlens[1:]]
    length = T + number.shape[0] * past + 1
    tokens = torch.where(real, before[:, :-1] + (sequence + 1) * past, length - 1)
    window = torch.arange(past, device=x.device)
    initial = (starts + number * past).unsqueeze(-1) + window
    final = (ends + number * past).unsqueeze(-1) + window
    row_start = length * torch.arange(B, device=x.device).unsqueeze(1)
    return _Places(tokens + row_start, initial.flatten(1) + row_start, final.flatten(1) + row_start, length)
