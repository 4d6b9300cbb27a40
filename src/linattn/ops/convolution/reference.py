"""The specification: the causal depthwise convolution of each sequence's real tokens, tap by tap."""

from itertools import pairwise

import torch
from torch import Tensor


def convolve(
    x: Tensor,  # (B, T, C)
    weight: Tensor,  # (C, W)
    key_mask: Tensor | None,  # (B, T)
    cu_seqlens: Tensor | None,  # (N+1,)
    initial: Tensor,  # (N, W-1, C)
) -> tuple[Tensor, Tensor]:
    """``y_t = sum_w weight[:, W-1-w] x_{t-w}`` at real tokens, 0 at masked ones; and the last W-1 real inputs."""
    B, T, C = x.shape
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    spans = [(b, s, e) for b in range(B) for s, e in pairwise(bounds)]
    outputs, finals = [], []
    for n, (b, s, e) in enumerate(spans):
        real = x.new_ones(e - s, dtype=torch.bool) if key_mask is None else key_mask[b, s:e]
        inputs = torch.cat([initial[n], x[b, s:e][real]])  # the past, then the sequence without its gaps
        length, past = int(real.sum()), initial.shape[1]
        convolved = x.new_zeros(length, C)
        for w in range(weight.shape[1]):
            convolved = convolved + weight[:, past - w] * inputs[past - w : past - w + length]
        output = x.new_zeros(e - s, C)
        output[real] = convolved
        outputs.append(output)
        finals.append(inputs[length:])
    return torch.cat(outputs).view(B, T, C), torch.stack(finals)
