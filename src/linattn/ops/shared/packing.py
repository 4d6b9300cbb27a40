"""Several sequences in one row, told apart by ``cu_seqlens``, and a row read in both directions."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from linattn.ops.shared.call import compute_dtype
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


def one_by_one(form: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a form ``(q, k, v, pattern, initial)`` of one sequence so that it takes packed ones too, in any dtype.

    It slices the inputs: meant for the forms whose purpose is to be obviously right. A pattern has ``cu_seqlens`` and
    ``part(start, end)``; the last of a form's results is its state.
    """

    @wraps(form)
    def packed(q: Tensor, k: Tensor, v: Tensor, pattern: Any, initial: Any) -> Any:
        q, k, v = (x.to(compute_dtype(q, k, v)) for x in (q, k, v))
        if pattern.cu_seqlens is None:
            return form(q, k, v, pattern, initial)
        parts, states = [], []
        for n, (s, e) in enumerate(pairwise(pattern.cu_seqlens.tolist())):
            state = type(initial)(*(x[n : n + 1] for x in initial))
            if s < e or q.shape[2] == 0:
                parts.append(form(q[:, :, s:e], k[:, :, s:e], v[:, :, s:e], pattern.part(s, e), state))
                state = parts[-1].state
            states.append(state)
        *tokens, _ = zip(*parts, strict=True)
        state = type(initial)(*(torch.cat(x) for x in zip(*states, strict=True)))
        return type(parts[0])(*(torch.cat(x, dim=2) for x in tokens), state)

    return packed
