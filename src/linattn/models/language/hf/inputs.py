"""What a call of a model is given besides tokens, checked: masks, positions and packed documents.

Packed documents lie end to end in one row, as the collators of transformers describe them.
``DataCollatorWithFlattening`` marks where documents begin by ``position_ids`` that restart and, on request, by
``cu_seq_lens_q`` and ``cu_seq_lens_k`` with the longest lengths, or by ``seq_idx``. All become ``cu_seqlens``.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.models.language.hf.cache import StateLayer
from linattn.ops.shared.call import check_values
from linattn.ops.shared.packing import sequence_of_tokens

OFFSETS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
LENGTHS = ("max_length_q", "max_length_k")  # redundant: they follow from the offsets
PACKING = (*OFFSETS[1:], *LENGTHS, "seq_idx")

ONE_ROW = (
    "documents that see nothing of one another are told apart by cu_seqlens, which takes a batch of 1: lay all of them "
    "end to end in one row (DataCollatorWithFlattening does), or give each a row of its own with attention_mask"
)
OF_A_CACHE = "a cache is that of one text: leave past_key_values and use_cache out"
OF_A_CLASS = "a class is that of a whole row: give each document a row of its own with attention_mask"
UNREAD = (
    "position_ids restart inside a row, and compiled or recorded code cannot ask where: pass cu_seqlens too "
    "(DataCollatorWithFlattening(return_flash_attn_kwargs=True) gives it)"
)


def named_offsets(cu_seqlens: Tensor | None, named: Mapping[str, Any]) -> Tensor | None:
    """``cu_seqlens``, under whichever of its names it was given; None if it was not."""
    values = (cu_seqlens, *map(named.get, OFFSETS[1:]))
    given = [(name, x) for name, x in zip(OFFSETS, values, strict=True) if x is not None]
    if not given:
        return _where_numbers_change(named.get("seq_idx"))
    (first, offsets), *others = given
    for name, x in others:
        if x is not offsets and not _same(x, offsets):
            raise ValueError(f"{name} and {first} must be the same offsets: queries and keys are those of one sequence")
    return offsets


def _same(one: Any, other: Any) -> bool:
    """Whether the two are equal, as far as can be seen without waiting for a device."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or one.shape != other.shape:
        return False
    return one.device.type != "cpu" or torch.compiler.is_compiling() or bool((one == other).all())


def offsets_of_positions(
    position_ids: Tensor, key_mask: Tensor | None, batch: int, refused: str | None = None
) -> Tensor | None:
    """``cu_seqlens`` of the documents that ``position_ids`` separate; None if each row is a single document.

    ``refused``: why a row may not have several documents (None: it may). On a GPU this waits for the device once.
    Compiled and recorded code cannot read positions: there the result is None, and positions that restart fail on the
    device.
    """
    begins = restarts(position_ids, key_mask)
    if torch.compiler.is_compiling() or (begins.is_cuda and torch.cuda.is_current_stream_capturing()):
        torch._assert_async(~begins.any(), UNREAD)
        return None
    found = begins.nonzero()
    if not len(found):
        return None
    row, token = found[0].tolist()
    where = f"position_ids restart at token {token} of row {row}"
    if refused is not None:
        raise ValueError(f"{where}, and {refused}")
    if batch > 1:
        raise ValueError(f"{where}, and {ONE_ROW}")
    if key_mask is not None:
        raise ValueError(f"{where}, and packed documents have no padding: leave it out, and attention_mask too")
    return _offsets(found[:, 1], begins.shape[1])


def restarts(position_ids: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """``(B, T)``, True where a document begins: at a real token whose position is not above the previous real one's."""
    if key_mask is None:
        return F.pad(position_ids[:, 1:] <= position_ids[:, :-1], (1, 0))
    real = key_mask.bool()
    places = position_ids.masked_fill(~real, torch.iinfo(position_ids.dtype).min)
    newest_real = (torch.arange(real.shape[1], device=real.device) * real).cummax(-1).values
    before = places.gather(1, newest_real[:, :-1])
    return F.pad(real[:, 1:] & (places[:, 1:] <= before), (1, 0))


def _where_numbers_change(seq_idx: Tensor | None) -> Tensor | None:
    """``cu_seqlens`` from ``seq_idx (1, T)``, the number of the sequence that each token belongs to."""
    if seq_idx is None:
        return None
    if torch.compiler.is_compiling():
        raise ValueError(
            "seq_idx cannot be read in compiled code: pass cu_seqlens "
            "(DataCollatorWithFlattening(return_flash_attn_kwargs=True) gives it)"
        )
    if seq_idx.ndim != 2 or seq_idx.shape[0] != 1:
        raise ValueError(f"seq_idx must be (1, tokens), got {tuple(seq_idx.shape)}: {ONE_ROW}")
    return _offsets((seq_idx[0, 1:] != seq_idx[0, :-1]).nonzero()[:, 0] + 1, seq_idx.shape[1])


def _offsets(begins: Tensor, length: int) -> Tensor:
    return F.pad(F.pad(begins, (1, 0)), (0, 1), value=length)


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
    if mask is None or layer is None or not layer.length or torch.compiler.is_compiling():
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
