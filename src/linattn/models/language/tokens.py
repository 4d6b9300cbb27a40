"""What a block is told about a batch of tokens, besides what they hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.models.language.rotary import Rotation
from linattn.ops.convolution_call import ConvolutionState
from linattn.ops.positions import sequence_of_tokens


@dataclass(frozen=True)
class Tokens:
    """``key_mask (B, T)``, True = real (None: all are); ``cu_seqlens (N+1,)`` of packed sequences.

    ``rotations``: what rotary positions do to each width of channels that a block turns; the blocks share them.
    """

    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    rotations: Mapping[int, Rotation] = field(default_factory=dict)


class BlockState(NamedTuple):
    """What a block remembers: its mechanism's state, and the last tokens before each of its Canon layers."""

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
    """Positions ``(1 or B, T)`` of the last ``length`` tokens, where only real ones count.

    ``key_mask (B, past + T)`` tells how many of the past were real; None: all of them but ``padding (B,)``.
    """
    if key_mask is not None:
        return (key_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    tokens = torch.arange(past, past + length, device=device).unsqueeze(0)
    if cu_seqlens is None:
        return tokens if padding is None else tokens - padding.to(device).unsqueeze(1)
    return tokens - cu_seqlens.long()[sequence_of_tokens(cu_seqlens, length)]


def labels_of_packed(labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Labels ``(1, T)`` without the first of every packed sequence: the end of the one before does not foretell it."""
    places = torch.arange(labels.shape[1], device=labels.device, dtype=cu_seqlens.dtype)
    return labels.masked_fill(torch.isin(places, cu_seqlens[:-1]), -100)
