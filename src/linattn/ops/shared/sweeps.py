"""Bidirectional decay in linear time: one sweep along the sequence, one against it."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from linattn.ops.shared.types import LinearState, Pattern, Sums

Sweep = Callable[[Tensor, Tensor, Tensor, Pattern, LinearState, bool], Sums]


def both_ways(sweep: Sweep, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, initial: LinearState) -> Sums:
    """Sums of two sweeps: M is a lower triangle with the diagonal plus an upper triangle without it.

    ``initial`` must be a zero state: a decay that runs both ways has no state to hand over.
    """
    forward = replace(pattern, causal=True)
    a = pattern.log_decay
    reversed_a = a if a is None or a.ndim == 1 else a.flip(2)
    cu = pattern.cu_seqlens
    reversed_cu = None if cu is None else k.shape[2] - cu.flip(0)
    backward = replace(forward, log_decay=reversed_a, cu_seqlens=reversed_cu)
    one = sweep(q, k, v, forward, initial, False)
    two = sweep(q.flip(2), k.flip(2), v.flip(2), backward, initial, True)
    return Sums(one.numerator + two.numerator.flip(2), one.denominator + two.denominator.flip(2), one.state)
