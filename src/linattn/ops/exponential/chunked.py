"""Exponential attention in linear time: with a running maximum it is a linear attention with a decay.

The sum ``S_t = e^{f_t} S_{t-1} + e^{i_t} x_t`` overflows when ``i`` is large. Measured in units of ``e^{m_t}`` with

    m_t = max(m_{t-1} + f_t, i_t)

it is ``S_t / e^{m_t} = e^{g_t} (S_{t-1} / e^{m_{t-1}}) + e^{i_t - m_t} x_t`` with ``g_t = f_t + m_{t-1} - m_t``:
a decayed sum whose decay and input scale are both at most 1. So the attention is a linear one with ``log_decay = g``
and keys scaled by ``e^{i_t - m_t}``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.ops.exponential.call import ExponentialState, ExponentialSums, Gates
from linattn.ops.linear.chunked import linear_sums
from linattn.ops.shared.call import num_sequences, widen
from linattn.ops.shared.packing import sequence_of_tokens
from linattn.ops.shared.types import STRONGEST_DECAY, LinearState, Pattern


def exponential_sums(q: Tensor, k: Tensor, v: Tensor, gates: Gates, initial: ExponentialState) -> ExponentialSums:
    stable = stabilize(gates.log_input, gates.log_decay, initial.log_scale, gates.cu_seqlens)
    k = k * stable.log_gain.exp().to(k).unsqueeze(-1)
    pattern = Pattern(causal=True, log_decay=stable.log_decay, decay_index="query", cu_seqlens=gates.cu_seqlens)
    sums = linear_sums(q, k, v, pattern, LinearState(initial.kv, initial.k))
    state = ExponentialState(sums.state.kv, sums.state.k, stable.final_log_scale)
    return ExponentialSums(sums.numerator, sums.denominator, stable.log_scale, state)


class Stabilized(NamedTuple):
    """The logarithms of a safe exponential sum, in fp64.

    ``log_decay`` and ``log_gain`` are ``(B, H, T)``, finite and <= 0. ``log_scale (B, H, T)`` is the maximum m,
    -inf where nothing came yet; ``final_log_scale (N, H)`` is its last value in each sequence.
    """

    log_decay: Tensor
    log_gain: Tensor
    log_scale: Tensor
    final_log_scale: Tensor


def stabilize(
    log_input: Tensor,
    log_decay: Tensor | None = None,
    initial_log_scale: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Stabilized:
    """The decay ``g``, input scale ``i - m`` and maximum ``m`` that make an exponential sum safe.

    The maximum cancels in every ratio, so gradients treat it as a constant: the derivatives of ``log_decay`` and
    ``log_gain`` with respect to f and i are 1, which is exact for every result that does not depend on the unit.

    Args:
        log_input: i ``(B, H, T)``, any real or -inf (a token that adds nothing).
        log_decay: f ``(B, H, T)`` <= 0, -inf allowed; None: no decay.
        initial_log_scale: m before the first token, ``(B, H)``, or ``(N, H)`` with ``cu_seqlens``; None: -inf.
        cu_seqlens: ``(N+1,)`` offsets of packed sequences (B = 1); the maximum starts anew in each.

    Example:
        >>> import torch
        >>> from linattn.ops.exponential.chunked import stabilize
        >>> s = stabilize(torch.tensor([[[1.0, 300.0, 2.0]]]))
        >>> s.log_scale.tolist(), s.log_decay.tolist()
        ([[[1.0, 300.0, 300.0]]], [[[0.0, -299.0, 0.0]]])
    """
    i = widen(log_input)
    start = (
        i.new_full((num_sequences(i, cu_seqlens), i.shape[1]), -torch.inf)
        if initial_log_scale is None
        else widen(initial_log_scale)
    )
    if log_decay is None and cu_seqlens is None and not start.requires_grad:
        return _of_maximum(i, start)
    f = torch.zeros_like(i) if log_decay is None else widen(log_decay)
    if cu_seqlens is None:
        first = torch.arange(i.shape[2], device=i.device) == 0
        start_of_token = start.unsqueeze(-1)
    else:
        sequence = sequence_of_tokens(cu_seqlens, i.shape[2])
        first = torch.arange(i.shape[2], device=i.device) == cu_seqlens[sequence]
        start_of_token = start.t()[None, :, sequence]

    m = _running_max(i.detach(), f.detach(), first, start_of_token.detach())
    previous = torch.where(first, start_of_token, _shift(m, 1, -torch.inf))
    # The doubling scan adds in a different order from token to token, so g could come out as +1e-16.
    change = torch.minimum(previous.detach() - m, -f.detach())
    # ``previous`` is a constant except for the initial scale, which is an input: its gradient enters here.
    g = (f + change + (previous - previous.detach())).clamp(min=STRONGEST_DECAY)
    g = torch.where(m == -torch.inf, STRONGEST_DECAY, g)  # everything was forgotten
    g = torch.where(previous == -torch.inf, 0.0, g)  # nothing there to decay
    gain = torch.where(i == -torch.inf, STRONGEST_DECAY, (i - m).clamp(min=STRONGEST_DECAY))
    return Stabilized(g, gain, m, _last(m, start, cu_seqlens))


def _of_maximum(i: Tensor, start: Tensor) -> Stabilized:
    """``stabilize`` without a decay, in half as many operations: one finds the running maximum of the whole row."""
    seen = torch.cat([start.unsqueeze(-1), i.detach()], dim=-1).cummax(-1).values
    previous, m = seen[..., :-1], seen[..., 1:]
    g = torch.where(previous == -torch.inf, 0.0, previous - m).clamp(min=STRONGEST_DECAY)
    gain = (i - m.clamp(min=torch.finfo(m.dtype).min)).clamp(min=STRONGEST_DECAY)
    return Stabilized(g, gain, m, seen[..., -1])


def _running_max(i: Tensor, f: Tensor, first: Tensor, start: Tensor) -> Tensor:
    """``m_t = max(m_{t-1} + f_t, i_t)`` for all t in log2(T) steps.

    The maps ``m -> max(m + a, b)`` compose into maps of the same kind, so prefixes double in length in each step.
    The first token of a sequence takes in the initial value and forgets everything before it (a = -inf).
    """
    b = torch.where(first, torch.maximum(start + f, i), i)
    a = f.masked_fill(first, -torch.inf)
    distance = 1
    while distance < i.shape[2]:
        b = torch.maximum(_shift(b, distance, -torch.inf) + a, b)
        a = _shift(a, distance, 0.0) + a
        distance *= 2
    return b


def _shift(x: Tensor, by: int, fill: float) -> Tensor:
    """Move ``x (B, H, T)`` towards the future by ``by`` tokens."""
    return torch.nn.functional.pad(x, (by, 0), value=fill)[..., : x.shape[-1]]


def _last(m: Tensor, start: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The maximum after the last token of each sequence; an empty one keeps its initial value."""
    if cu_seqlens is None:
        return m[..., -1] if m.shape[2] else start
    ends = torch.nn.functional.pad(m, (1, 0))[0].index_select(-1, cu_seqlens[1:]).t()  # (N, H)
    return torch.where((cu_seqlens[1:] > cu_seqlens[:-1]).unsqueeze(-1), ends, start)
