"""What a call of the language model is given, held against what came before."""

import torch
from torch import Tensor

from linattn.models.language.hf.cache import StateLayer


def check_rows(layer: StateLayer, batch: int) -> None:
    """A state is that of one row."""
    if layer.state is not None and layer.batch_size != batch:
        raise ValueError(
            f"past_key_values has states of {layer.batch_size} rows, but input_ids has {batch} rows: "
            "past_key_values.batch_repeat_interleave(n) gives each row n times, as generate takes it with num_beams or "
            "num_return_sequences; batch_select_indices(rows) chooses some"
        )


def check_call(
    mask: Tensor | None, positions: Tensor | None, cu_seqlens: Tensor | None, batch: int, length: int, past: int
) -> None:
    """Raise for shapes that do not fit ``length`` tokens behind ``past`` ones, and for padding in a packed row."""
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.ndim != 2 or tuple(mask.shape) != (batch, past + length):
            got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask must be (batch, past + tokens) = ({batch}, {past + length}), 1 = real token, got {got}"
            )
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens packs sequences without padding: leave attention_mask out")
    if positions is not None and tuple(positions.shape) not in ((batch, length), (1, length)):
        raise ValueError(
            f"position_ids must be (batch or 1, tokens) = ({batch}, {length}), got {tuple(positions.shape)}"
        )


def check_past(mask: Tensor | None, padding: Tensor | None, past: int, *, waits: bool = False) -> None:
    """The mask hides as many earlier tokens of each row as were hidden when they were read.

    Not asked in compiled code, nor of a mask on a GPU, unless the caller ``waits`` for it.
    """
    if mask is None or padding is None or not past or torch.compiler.is_compiling():
        return
    if mask.device.type != "cpu" and not waits:
        return
    hidden = past - mask[:, :past].bool().sum(-1)
    if hidden.shape == padding.shape and not torch.equal(hidden, padding.to(hidden)):
        raise ValueError(
            f"attention_mask hides {hidden.tolist()} of the {past} tokens that the rows of the cache have read, of "
            f"which {padding.tolist()} were padding: pass the mask of all tokens, those of the cache first, or none"
        )


def check_places(positions: Tensor, tokens: int, places: int) -> None:
    """Each position must have a vector. ``tokens``: in a row, with what came before and with padding.

    On a GPU, where a look at positions would wait for it, these are counted, and positions are looked at only if they
    are too many; in compiled and recorded code they are counted alone.
    """
    last, compiled = tokens, torch.compiler.is_compiling()
    if not compiled and (not positions.is_cuda or (last > places and not torch.cuda.is_current_stream_capturing())):
        last = int(positions.max()) + 1
    if last > places:
        raise ValueError(
            f"input_ids must not go beyond max_position_embeddings = {places} tokens, what came before included, "
            f"got {last}"
        )
