"""Packed batches: several sequences laid end to end in one row, told apart by ``cu_seqlens``."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from itertools import pairwise

import torch
from torch import Tensor

from linattn.ops.shared.types import LinearState, Pattern, Sums

Form = Callable[[Tensor, Tensor, Tensor, Pattern, LinearState | None], Sums]
FormOfOneSequence = Callable[[Tensor, Tensor, Tensor, Pattern, LinearState], Sums]


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of states, gates and sums: fp32, or fp64 if any of the tensors is fp64."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def num_sequences(k: Tensor, cu_seqlens: Tensor | None) -> int:
    return k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def zero_state(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> LinearState:
    dtype, n = compute_dtype(k, v), num_sequences(k, cu_seqlens)
    kv = torch.zeros(n, k.shape[1], k.shape[3], v.shape[3], dtype=dtype, device=k.device)
    return LinearState(kv, torch.zeros(n, k.shape[1], k.shape[3], dtype=dtype, device=k.device))


def one_by_one(form: FormOfOneSequence) -> Form:
    """Wrap a form written for one sequence so that it takes packed ones too; it gets upcast inputs and a real state.

    It slices the inputs: meant for the forms whose purpose is to be obviously right.
    """

    @wraps(form)
    def packed(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, initial: LinearState | None = None) -> Sums:
        initial = zero_state(k, v, pattern.cu_seqlens) if initial is None else initial
        q, k, v = (x.to(compute_dtype(q, k, v)) for x in (q, k, v))
        if pattern.cu_seqlens is None:
            return form(q, k, v, pattern, initial)
        bounds = pattern.cu_seqlens.tolist()
        parts = []
        for n, (s, e) in enumerate(pairwise(bounds)):
            a = pattern.log_decay
            a = a if a is None or a.ndim == 1 else a[:, :, s:e]
            own = replace(pattern, log_decay=a, cu_seqlens=None)
            state = LinearState(initial.kv[n : n + 1], initial.k[n : n + 1])
            parts.append(form(q[:, :, s:e], k[:, :, s:e], v[:, :, s:e], own, state))
        return Sums(
            torch.cat([p.numerator for p in parts], dim=2),
            torch.cat([p.denominator for p in parts], dim=2),
            LinearState(torch.cat([p.state.kv for p in parts]), torch.cat([p.state.k for p in parts])),
        )

    return packed
