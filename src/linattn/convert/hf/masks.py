"""Masks for linear attention inside transformers: they say which keys are real, without a matrix of pairs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from linattn.ops.hybrid.decoding import NEWEST_REAL

REFUSED = (
    "linear attention knows causal and bidirectional masks with padding; this model asks for another pattern: a "
    "sliding window shorter than the text, packed sequences (pass attention_mask), or a mask of its own"
)
WINDOWS = ("sliding_window", "attention_chunk_size")  # names of options in configs


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    keeps_windows: bool = False,
    **options: Any,
) -> Tensor | None:
    """Return the 2-D mask unchanged: ``(B, seen)``, True = real token; None: all ``kv_length`` keys are real.

    ``seen`` counts all tokens so far, padding included; a static cache has more slots than that. ``keeps_windows``:
    layers that keep their window get the pattern ``(B, 1, Tq, Tk)`` of that window.
    """
    seen = kv_length if mask_function is bidirectional_mask_function else int(q_offset) + q_length
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        # Without a window in the config no layer has one: the pattern would reach converted layers.
        windowed = keeps_windows and any(getattr(options.get("config"), name, None) is not None for name in WINDOWS)
        pairs = sdpa_mask(
            batch_size, q_length, kv_length, q_offset=q_offset, kv_offset=kv_offset,  # type: ignore[arg-type]
            mask_function=mask_function, attention_mask=attention_mask if windowed else None, **(options | skips),
        )  # fmt: skip
        assert pairs is not None  # without skips it never is
        if windowed:
            return pairs
        causal = torch.ones(q_length, kv_length, dtype=torch.bool, device=pairs.device).tril(kv_length - q_length)
        # A window longer than the text is plainly causal, unless tokens have left the cache, or slots are empty.
        if keeps_windows or kv_length != seen or not bool((pairs == causal).all()):
            raise ValueError(REFUSED)
    if attention_mask is None:
        real = torch.ones(batch_size, seen, dtype=torch.bool, device=options.get("device"))
        return None if seen == kv_length else _marked(real)
    if attention_mask.ndim != 2 or attention_mask.shape[1] != seen:
        given = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask must be (B, {seen}), one entry per token so far, got {given}")
    real = attention_mask.bool().detach()  # a tensor of its own, never the caller's
    all_real, newest_real = torch.stack([real.all(), real[:, -q_length:].all()]).tolist()
    if seen == kv_length and all_real:
        return None
    return _marked(real) if newest_real else real


linearized_mask = partial(padding_mask, keeps_windows=True)


def _marked(mask: Tensor) -> Tensor:
    """Mark a mask whose newest tokens are all real, so that layers need not read this off the device again."""
    setattr(mask, NEWEST_REAL, True)
    return mask


def expand(mask: Tensor | None, q_length: int, kv_length: int, *, causal: bool) -> Tensor | None:
    """The pairs ``(B or 1, 1, Tq, Tk)`` that see each other under a 2-D mask; None: ``is_causal`` alone says it.

    The last query belongs to the last token seen.
    """
    if mask is None and (not causal or q_length in (1, kv_length)):
        return None
    seen = kv_length if mask is None else mask.shape[1]
    visible = torch.ones(q_length, seen, dtype=torch.bool, device=None if mask is None else mask.device)
    visible = (visible.tril(seen - q_length) if causal else visible)[None, None]
    if mask is not None:
        visible = visible & mask.bool()[:, None, None, :]
    return torch.nn.functional.pad(visible, (0, kv_length - seen))
