"""Packed documents, laid end to end in one row, as the collators of transformers describe them.

``DataCollatorWithFlattening`` marks where documents begin by ``position_ids`` that restart and, on request, by
``cu_seq_lens_q`` and ``cu_seq_lens_k`` with the longest lengths, or by ``seq_idx``. All become ``cu_seqlens``.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
