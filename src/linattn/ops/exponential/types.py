"""The small types of exponential attention, and how a form for one sequence serves packed ones."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class ExponentialState(NamedTuple):
    """State of exponential attention: gated and decayed sums in units of ``e^{log_scale}``.

    The sum of ``k_s v_s^T`` is ``e^{log_scale} kv``, and the sum of the keys is ``e^{log_scale} k``, with
    ``kv (B, H_kv, K, V)``, ``k (B, H_kv, K)`` and ``log_scale (B, H_kv)``, which is -inf for an empty state. All are
    fp32, or fp64 for fp64 inputs. With ``cu_seqlens`` B counts sequences.
    """

    kv: Tensor
    k: Tensor
    log_scale: Tensor


class ExponentialOutput(NamedTuple):
    """Output ``(B, H, T, V)`` together with the state after the last token."""

    output: Tensor
    state: ExponentialState


@dataclass(frozen=True)
class Gates:
    """Gates ``(B, H_kv, T)`` in fp64; masked tokens have ``log_input`` -inf and ``log_decay`` 0."""

    log_input: Tensor
    log_decay: Tensor
    cu_seqlens: Tensor | None = None


class ExponentialSums(NamedTuple):
    """The result of one form before the division; sums at token t are in units of ``e^{log_scale_t}``."""

    numerator: Tensor  # (B, H, T, V)
    denominator: Tensor  # (B, H, T)
    log_scale: Tensor  # (B, H_kv, T), fp64
    state: ExponentialState  # its log_scale in fp64


Form = Callable[[Tensor, Tensor, Tensor, Gates, ExponentialState], ExponentialSums]


def one_by_one(form: Form) -> Form:
    """Wrap a form written for one sequence of at least one token so that it takes packed and empty sequences too.

    It slices the inputs: meant for the forms whose purpose is to be obviously right.
    """

    @wraps(form)
    def packed(q: Tensor, k: Tensor, v: Tensor, gates: Gates, initial: ExponentialState) -> ExponentialSums:
        if gates.cu_seqlens is None and k.shape[2] > 0:
            return form(q, k, v, gates, initial)
        bounds = [0, 0] if gates.cu_seqlens is None else gates.cu_seqlens.tolist()
        parts: list[ExponentialSums] = []
        states: list[ExponentialState] = []
        for n, (s, e) in enumerate(pairwise(bounds)):
            state = initial if gates.cu_seqlens is None else ExponentialState(*(x[n : n + 1] for x in initial))
            if e > s:
                own = Gates(gates.log_input[:, :, s:e], gates.log_decay[:, :, s:e])
                parts.append(form(q[:, :, s:e], k[:, :, s:e], v[:, :, s:e], own, state))
                state = parts[-1].state
            states.append(state)
        nothing = q.new_zeros(*q.shape[:2], 0, v.shape[3])
        return ExponentialSums(
            torch.cat([nothing] + [p.numerator for p in parts], dim=2),
            torch.cat([nothing.sum(-1)] + [p.denominator for p in parts], dim=2),
            torch.cat([gates.log_input[:, :, :0]] + [p.log_scale for p in parts], dim=2),
            ExponentialState(*(torch.cat(x) for x in zip(*states, strict=True))),
        )

    return packed
