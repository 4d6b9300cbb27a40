"""What a block needs to know about a batch of tokens besides their values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.models.language.rotary import Rotation
from linattn.ops.convolution.call import ConvolutionState
from linattn.ops.shared.packing import sequence_of_tokens


@dataclass(frozen=True)
class Tokens:
    """Padding, packing and positions of a batch.

    ``key_mask (B, T)``: True = real token (None: all are). ``cu_seqlens (N+1,)``: offsets of packed sequences.
    ``rotations``: the rotation for each number of channels that some block turns; all blocks share them.
    """

    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    rotations: Mapping[int, Rotation] = field(default_factory=dict)


class BlockState(NamedTuple):
    """What a block remembers: the state of its mechanism, and the last inputs of each of its Canon layers."""

    mechanism: Any
    canon_a: ConvolutionState | None = None
    canon_b: ConvolutionState | None = None
    canon_c: ConvolutionState | None = None
    canon_d: ConvolutionState | None = None


def positions_of(
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    length: int,
    past: int,
    device: torch.device,
    padding: Tensor | None = None,
) -> Tensor:
    """Positions ``(1 or B, T)`` of the last ``length`` tokens; padding is not counted.

    ``key_mask (B, past + T)`` tells which tokens are real, the past included; None: all but ``padding (B,)``.
    """
    if key_mask is not None:
        return (key_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    tokens = torch.arange(past, past + length, device=device).unsqueeze(0)
    if cu_seqlens is None:
        return tokens if padding is None else tokens - padding.to(device).unsqueeze(1)
    return tokens - cu_seqlens.long()[sequence_of_tokens(cu_seqlens, length)]


def labels_of_packed(labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Labels ``(1, T)`` with the first of each packed sequence ignored: nothing before it belongs to its sequence."""
    places = torch.arange(labels.shape[1], device=labels.device, dtype=cu_seqlens.dtype)
    return labels.masked_fill(torch.isin(places, cu_seqlens[:-1]), -100)
