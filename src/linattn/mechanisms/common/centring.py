"""Logits from which, and their exponentials, what they have in common is taken off before they are summed."""

import torch
from torch import Tensor

from linattn.ops.positions import sequence_of_tokens

# How far apart the first two logits may lie for others to be expected near them.
NEAR = 1.0


def centred(z: Tensor, log_scale: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """``z - c`` and ``r = e^{c - m} (B, H_kv, T)`` with the smaller one of a sequence's first two logits for c.

    Where logits are near to one another, the sums that cancel are then as small as what they leave. r may not be the
    larger part of many weights: it is 0 if those two are far apart. Two alike and far above all others do cost digits
    (6 above: outputs of bf16 are 1 % off instead of 0.2 %). No later token may choose: it would move the noise on what
    came before. The second one does not, for the first one's output is the same whatever c and r are.
    """
    known = z.detach()
    if cu_seqlens is None:
        first, second = known[:, :, :1], known[:, :, 1:2]
    else:
        own, bounds = sequence_of_tokens(cu_seqlens, z.shape[2]), cu_seqlens.long()
        start = bounds[own]
        first, second = known[:, :, start], known[:, :, torch.minimum(start + 1, bounds[own + 1] - 1)]
    c, near = torch.minimum(first, second), (first - second).abs() <= NEAR
    return z - c, (c.squeeze(-1) - log_scale).exp() * near.squeeze(-1)
