"""The causal depthwise convolution as a recurrence: a window that moves on by one real token at a time."""

from itertools import pairwise

import torch
from torch import Tensor


def convolve(
    x: Tensor, weight: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """Convolve token by token; arguments and results as in the reference form."""
    if cu_seqlens is None:
        return _sweep(x, weight, key_mask, initial)
    outputs, finals = [], []
    for n, (s, e) in enumerate(pairwise(cu_seqlens.tolist())):
        mask = None if key_mask is None else key_mask[:, s:e]
        output, final = _sweep(x[:, s:e], weight, mask, initial[n : n + 1])
        outputs.append(output)
        finals.append(final)
    return torch.cat(outputs, dim=1), torch.cat(finals)


def _sweep(x: Tensor, weight: Tensor, key_mask: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    taps = weight.t()  # (W, C), oldest first, like the window
    outputs = []
    for t in range(x.shape[1]):
        window = torch.cat([state, x[:, t : t + 1]], dim=1)  # (B, W, C)
        output = (window * taps).sum(1)
        if key_mask is None:
            state = window[:, 1:]
        else:
            real = key_mask[:, t, None]
            output = output.masked_fill(~real, 0)
            state = torch.where(real.unsqueeze(-1), window[:, 1:], state)
        outputs.append(output)
    return torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x), state
