"""Checks of the arguments of a call, against one another and against the cache."""

import torch
from torch import Tensor

from linattn.models.language.hf.cache import StateLayer
from linattn.ops.shared.checks import check_values


def check_rows(layer: StateLayer, batch: int) -> None:
    """Raise unless the cache has a state for each row of the batch."""
    if layer.state is not None and layer.batch_size != batch:
        raise ValueError(
            f"past_key_values has states of {layer.batch_size} rows, but input_ids has {batch} rows: "
            "past_key_values.batch_repeat_interleave(n) gives each row n times, as generate takes it with num_beams or "
            "num_return_sequences; batch_select_indices(rows) chooses some"
        )


def check_call(
    mask: Tensor | None, positions: Tensor | None, cu_seqlens: Tensor | None, batch: int, length: int, past: int
) -> None:
    """Raise for shapes that do not fit ``length`` tokens after ``past`` ones, and for a mask of packed sequences."""
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a tensor of offsets, got {type(cu_seqlens).__name__}")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.ndim != 2 or tuple(mask.shape) != (batch, past + length):
            got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask must be (batch, past + tokens) = ({batch}, {past + length}), 1 = real token, got {got}"
            )
        _check_mask_values(mask)
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens packs sequences without padding: leave attention_mask out")
    # Number by number: torch 2.11 cannot compare a tuple with a shape whose numbers are unknown when it compiles.
    if positions is not None and not (
        positions.ndim == 2
        and positions.shape[1] == length
        and (positions.shape[0] == batch or positions.shape[0] == 1)
    ):
        raise ValueError(
            f"position_ids must be (batch or 1, tokens) = ({batch}, {length}), got {tuple(positions.shape)}"
        )


def _check_mask_values(mask: Tensor) -> None:
    """Raise for values other than 0 and 1, which are looked at on a CPU only.

    An additive mask has 0 where this one has 1: taken for one, it would hide the text.
    """
    if mask.dtype == torch.bool or not check_values(mask, None):
        return
    other = mask[(mask != 0) & (mask != 1)]
    if other.numel():
        raise ValueError(
            f"attention_mask must be 1 at real tokens and 0 at padding, got {other[0].item():g}; "
            "of a mask that is added to weights pass mask == 0"
        )


def check_past(mask: Tensor | None, layer: StateLayer | None, *, waits: bool = False) -> None:
    """Raise unless the mask hides as many tokens of the past, in each row, as were hidden when they were read.

    Not checked in compiled code; nor for a mask on a GPU, unless ``waits``: that has to wait for the device.
    """
    if mask is None or layer is None or not layer.length or not layer.counted or torch.compiler.is_compiling():
        return
    if mask.device.type != "cpu" and not waits:
        return
    past = layer.length
    hidden = past - mask[:, :past].bool().sum(-1)
    padding = torch.zeros_like(hidden) if layer.padding is None else layer.padding.to(hidden)
    if hidden.shape == padding.shape and not torch.equal(hidden, padding):
        raise ValueError(
            f"attention_mask hides {hidden.tolist()} of the {past} tokens that the rows of the cache have read, of "
            f"which {padding.tolist()} were padding: pass the mask of all tokens, those of the cache first, with 0 "
            "where they were padding when it read them"
        )


def check_places(positions: Tensor, tokens: int, places: int, *, counted: bool) -> None:
    """Raise if a position is not below ``places``, the number of learned position vectors.

    ``tokens``: tokens of a row, those of the past and padding included. ``counted``: positions simply count these, as
    nothing was packed, padded or given by the caller. Reading positions from a GPU waits for it, so there they are
    read only if ``tokens > places``. Compiled and recorded code cannot read them: a wrong one fails on the device.
    """
    last, words = tokens, f"input_ids must not go beyond max_position_embeddings = {places} tokens"
    blind = torch.compiler.is_compiling() or (positions.is_cuda and torch.cuda.is_current_stream_capturing())
    if blind and last > places and not counted:
        torch._assert_async((positions < places).all(), f"{words}, what came before included")
        return
    if not blind and (not positions.is_cuda or last > places):
        last = int(positions.max()) + 1
    if last > places:
        raise ValueError(f"{words}, what came before included, got {last}")
