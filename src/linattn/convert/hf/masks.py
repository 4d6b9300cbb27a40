"""Masks for linear attention inside transformers: they say which keys are real, without a matrix of pairs."""

from collections.abc import Callable
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
    **options: Any,
) -> Tensor | None:
    """Return the 2-D mask unchanged: ``(B, seen)``, True = real token; None: all ``kv_length`` keys are real.

    ``seen`` counts all tokens so far, padding included; a static cache has more slots than that.
    """
    window = (batch_size, q_length, kv_length, q_offset, kv_offset)
    if not _plain(mask_function, window, options):
        raise ValueError(REFUSED)
    return _seen(window, mask_function, attention_mask, options.get("device"))


def linearized_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """As :func:`padding_mask`, but layers that keep their window get the pattern ``(B, 1, Tq, Tk)`` of that window."""
    window = (batch_size, q_length, kv_length, q_offset, kv_offset)
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return _seen(window, mask_function, attention_mask, options.get("device"))
    if all(getattr(options.get("config"), name, None) is None for name in WINDOWS):
        raise ValueError(REFUSED)  # no layer has a window: the pattern would reach converted layers
    return _pairs(window, mask_function, options, attention_mask)


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


def _seen(window: tuple, mask_function: Callable, mask: Tensor | None, device: Any) -> Tensor | None:
    batch_size, q_length, kv_length, q_offset, _ = window
    seen = kv_length if mask_function is bidirectional_mask_function else int(q_offset) + q_length
    if mask is None:
        return None if seen == kv_length else _marked(torch.ones(batch_size, seen, dtype=torch.bool, device=device))
    if mask.ndim != 2 or mask.shape[1] != seen:
        raise ValueError(f"attention_mask must be (B, {seen}), one entry per token so far, got {tuple(mask.shape)}")
    real = mask.bool().detach()  # a tensor of its own, never the caller's
    all_real, newest_real = torch.stack([real.all(), real[:, -q_length:].all()]).tolist()
    if seen == kv_length and all_real:
        return None
    return _marked(real) if newest_real else real


def _marked(mask: Tensor) -> Tensor:
    """Mark a mask whose newest tokens are all real, so that layers need not read this off the device again."""
    setattr(mask, NEWEST_REAL, True)
    return mask


def _plain(mask_function: Callable, window: tuple, options: dict[str, Any]) -> bool:
    """Whether the pattern is plainly causal or bidirectional, as that of a window longer than the text is."""
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return True
    _, q_length, kv_length, q_offset, _ = window
    pairs = _pairs(window, mask_function, options)
    if kv_length != int(q_offset) + q_length:  # tokens have left a sliding cache, or slots are empty
        return False
    causal = torch.ones(q_length, kv_length, dtype=torch.bool, device=pairs.device).tril(kv_length - q_length)
    return bool((pairs == causal).all())


def _pairs(window: tuple, mask_function: Callable, options: dict[str, Any], mask: Tensor | None = None) -> Tensor:
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    batch_size, q_length, kv_length, q_offset, kv_offset = window
    sizes = {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function, "attention_mask": mask}
    pairs = sdpa_mask(batch_size, q_length, kv_length, **(options | sizes | skips))
    assert pairs is not None  # without skips it never returns None
    return pairs
