"""``exponential_attention``: a recurrence whose input gate is an exponential, safe for gates of any size.

C_t = e^{log_decay_t} C_{t-1} + e^{log_input_t} k_t v_t^T,      n_t likewise with 1 in place of v
o_t = q_t C_t / max(|q_t . n_t|, 1)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linattn.kernels.exponential import attend as kernels
from linattn.ops.exponential import chunked, recurrent, reference
from linattn.ops.exponential.call import (
    ExponentialCall,
    ExponentialOutput,
    ExponentialState,
    ExponentialSums,
    Gates,
)
from linattn.ops.shared.call import (
    chooser,
    compute_dtype,
    hide,
    one_token,
    output_dtype,
    widen,
    without_autocast,
    zero_state,
)

FORMS: dict[str, Callable[[Tensor, Tensor, Tensor, Gates, ExponentialState], ExponentialSums]] = {
    "reference": reference.exponential_sums,
    "recurrent": recurrent.exponential_sums,
    "chunked": chunked.exponential_sums,
}

# e^{-m}, which is the 1 of the denominator in units of e^m, is kept within e^{+-bound}. There it is representable, and
# so is the gradient of a query that is 0, which is the state divided by e^{-m}.
EXPONENT_BOUND = {torch.float32: 80.0, torch.float64: 700.0}
checked_choice = chooser(kernels, own_gradients=True)


def exponential_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_input: Tensor,
    log_decay: Tensor,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
    validate: bool | None = None,
) -> Tensor:
    """Causal attention with an exponential input gate and a decay: the recurrence of the mLSTM.

    ``C_t = f_t C_{t-1} + e^{i_t} k_t v_t^T,  n_t = f_t n_{t-1} + e^{i_t} k_t,  o_t = q_t C_t / max(|q_t . n_t|, 1)``

    The sums are kept in units of a running maximum, so that gates of any size stay finite. The gradient is exact: it
    includes the gradient of the denominator.

    Args:
        q, k, v, key_mask, cu_seqlens, impl, validate: as in :func:`linear_attention`.
        log_input: ``i``, the logarithm of the input gate (its pre-activation), ``(B, H_kv, T)``, any real.
        log_decay: ``log f <= 0``, ``(B, H_kv, T)``; in the mLSTM, ``logsigmoid`` of a pre-activation.
        scale: factor on q; None: ``K**-0.5``.

    Returns:
        ``(B, H, T, V)`` in the dtype of v (under autocast, in the dtype of autocast).

    Example:
        >>> import torch
        >>> from linattn import exponential_attention
        >>> q, k, v = torch.randn(3, 1, 4, 256, 32).unbind()
        >>> log_input, forget = torch.randn(2, 1, 4, 256).unbind()
        >>> log_decay = torch.nn.functional.logsigmoid(forget + 3)
        >>> exponential_attention(q, k, v, log_input=log_input, log_decay=log_decay).shape
        torch.Size([1, 4, 256, 32])
    """
    return _run(ExponentialCall(q, k, v, log_input, log_decay, scale, key_mask, cu_seqlens, validate), impl).output


def exponential_attention_with_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: ExponentialState | None = None,
    impl: str = "auto",
    **options: Any,
) -> ExponentialOutput:
    """:func:`exponential_attention` that starts from a state and also returns the state after the last token.

    ``options`` are those of :func:`exponential_attention`. A sequence may be cut anywhere; if the state is handed over,
    the pieces give what the whole sequence gives. With ``cu_seqlens`` the state has one row per sequence. Gradients
    flow through ``kv`` and ``k``, and into the ``log_scale`` of the initial state. The ``log_scale`` of the returned
    state is a unit and therefore a constant, also after an empty sequence.

    Example:
        >>> import torch
        >>> from linattn import exponential_attention_with_state
        >>> q, k, v = torch.randn(3, 1, 2, 10, 4).unbind()
        >>> log_input, log_decay = torch.full((2, 1, 2, 10), -0.5).unbind()
        >>> output, state = exponential_attention_with_state(q, k, v, log_input=log_input, log_decay=log_decay)
        >>> output.shape, state.kv.shape, state.log_scale.shape
        (torch.Size([1, 2, 10, 4]), torch.Size([1, 2, 4, 4]), torch.Size([1, 2]))
    """
    return _run(ExponentialCall(q, k, v, initial_state=initial_state, need_state=True, **options), impl)


def exponential_attention_step(
    q_t: Tensor, k_t: Tensor, v_t: Tensor, state: ExponentialState | None, **options: Any
) -> ExponentialOutput:
    """One decoding step of :func:`exponential_attention`: attend with one token and return the next state.

    ``q_t (B, H, K)``, ``k_t (B, H_kv, K)``, ``v_t (B, H_kv, V)`` and the gates ``log_input`` and ``log_decay``,
    ``(B, H_kv)``, are the token's; ``scale`` and ``validate`` are as there. A state of None is empty. Returns the
    output ``(B, H, V)`` and the next state.

    Example:
        >>> import torch
        >>> from linattn import exponential_attention_step
        >>> q_t, k_t, v_t = torch.randn(3, 1, 2, 4).unbind()
        >>> log_input, log_decay = torch.full((2, 1, 2), -0.5).unbind()
        >>> output, state = exponential_attention_step(q_t, k_t, v_t, None, log_input=log_input, log_decay=log_decay)
        >>> output.shape, state.log_scale.tolist()
        (torch.Size([1, 2, 4]), [[-0.5, -0.5]])
    """
    call = one_token(ExponentialCall, (q_t, k_t, v_t), state, options, ("log_input", "log_decay"))
    output, state = _run(call, "auto")
    return ExponentialOutput(output.squeeze(2), state)


def _run(call: ExponentialCall, impl: str) -> ExponentialOutput:
    chosen = checked_choice(call, impl).impl
    q, v, out_dtype = call.q, call.v, output_dtype(call.v)
    with without_autocast(q):
        if chosen == "triton":
            output, state = kernels.attend(call, out_dtype)
            return ExponentialOutput(output, _fix_unit(state) if call.need_state else state)
        dtype = compute_dtype(q, call.k, v)
        q = q.to(dtype) * (q.shape[3] ** -0.5 if call.scale is None else call.scale)
        k, v = (hide(x, call.key_mask).to(dtype) for x in (call.k, v))
        log_input, log_decay = (widen(gate) for gate in call.masked_gates())
        # Without tokens there is nothing to compute, and only the chunked form is written for that.
        form = FORMS[chosen if k.shape[2] else "chunked"]
        sums = form(q, k, v, Gates(log_input, log_decay, call.cu_seqlens), _initial(call, dtype))
        output = _divide(sums)
        state = _fix_unit(sums.state)
    return ExponentialOutput(output.to(out_dtype), state)


def _initial(call: ExponentialCall, dtype: torch.dtype) -> ExponentialState:
    if call.initial_state is None:
        kv, k = zero_state(call.k, call.v, call.cu_seqlens)
        kv, k = kv.to(dtype), k.to(dtype)
        return ExponentialState(kv, k, widen(k.new_full(k.shape[:2], -torch.inf)))
    kv, k, log_scale = call.initial_state
    return ExponentialState(kv.to(dtype), k.to(dtype), widen(log_scale))


def _divide(sums: ExponentialSums) -> Tensor:
    """``numerator / max(|denominator|, e^{-m})``: in units of e^m, the 1 of ``max(|q . n|, 1)`` is e^{-m}."""
    numerator, denominator, log_scale, _ = sums
    bound = EXPONENT_BOUND[numerator.dtype]
    one = (-log_scale).clamp(-bound, bound).exp().to(numerator.dtype)  # (B, H_kv, T)
    one = one.repeat_interleave(numerator.shape[1] // one.shape[1], dim=1)
    return numerator / torch.maximum(denominator.abs(), one).unsqueeze(-1)


def _fix_unit(state: ExponentialState) -> ExponentialState:
    """The state with its unit as a constant, in the dtype of the sums.

    The sums absorb what is lost when a large unit is rounded, and the gradient of a unit that an empty sequence
    hands on: they become e^{m - c} kv in units of e^c, where c is the rounded m as a constant. A unit that has the
    dtype of the sums and no gradient is a constant already.
    """
    kv, k, log_scale = state
    if log_scale.dtype == kv.dtype and not log_scale.requires_grad:
        return state
    unit = log_scale.detach().to(kv.dtype)
    left = torch.where(unit.isinf(), 0.0, log_scale - unit).exp().to(kv.dtype)
    return ExponentialState(kv * left[..., None, None], k * left[..., None], unit)
