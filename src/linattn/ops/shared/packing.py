"""Several sequences in one row, told apart by ``cu_seqlens``, and a row read in both directions."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from linattn.ops.shared.types import LinearState, Pattern, Sums

Sweep = Callable[[Tensor, Tensor, Tensor, Pattern, LinearState, bool], Sums]


def sequence_of_tokens(cu_seqlens: Tensor, length: int) -> Tensor:
    """The sequence each of ``length`` packed tokens belongs to, ``(T,)`` int64; empty sequences have none."""
    tokens = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)


def both_ways(sweep: Sweep, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, initial: LinearState) -> Sums:
    """A bidirectional decay in linear time: one sweep along the sequence, one against it.

    M is a lower triangle with the diagonal plus an upper triangle without it. ``initial`` must be a zero state: a decay
    that runs both ways has no state to hand over.
    """
    forward = replace(pattern, causal=True)
    a, cu = pattern.log_decay, pattern.cu_seqlens
    backward = replace(
        forward,
        log_decay=a if a is None or a.ndim == 1 else a.flip(2),
        cu_seqlens=None if cu is None else k.shape[2] - cu.flip(0),
    )
    one = sweep(q, k, v, forward, initial, False)
    two = sweep(q.flip(2), k.flip(2), v.flip(2), backward, initial, True)
    return Sums(one.numerator + two.numerator.flip(2), one.denominator + two.denominator.flip(2), one.state)
