"""The short convolution in one pass, with masks, packed sequences, bias, activation and residual inside the kernel."""

import torch
from torch import Tensor

from linattn.kernels.common.support import reason_against
from linattn.kernels.convolution.library import convolution_step, convolution_step_in_place, convolve_directly
from linattn.kernels.convolution.places import last_inputs, lay_out
from linattn.ops.convolution.call import Activation, ConvolutionCall

# The window, its gradients and the taps live in registers.
WIDEST = 8


def reason_against_convolution(x: Tensor, weight: Tensor, *others: Tensor | None) -> str:
    """Why the kernels cannot serve this convolution, in words; empty if they can."""
    if weight.shape[1] > WIDEST:
        return f"the convolution is {weight.shape[1]} tokens wide, kernels take at most {WIDEST}"
    return reason_against(x, weight, *(t for t in others if t is not None))


def against(call: ConvolutionCall) -> str:
    """Why no kernel serves the call, in words; empty if one does."""
    return reason_against_convolution(call.x, call.weight, call.bias)


def convolve_call(call: ConvolutionCall, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output and last inputs of a checked call; a step has its own kernel."""
    inputs = None if call.initial_state is None else call.initial_state.inputs
    if call.is_step:
        y, last = convolve_step(
            call.x.squeeze(1), call.weight, call.bias, inputs, residual=call.residual, activation=call.activation,
            out_dtype=out_dtype,
        )  # fmt: skip
        return y.unsqueeze(1), last
    return convolve_fused(
        call.x, call.weight, call.bias, residual=call.residual, activation=call.activation, key_mask=call.key_mask,
        cu_seqlens=call.cu_seqlens, initial=inputs, out_dtype=out_dtype,
    )  # fmt: skip


def convolve(
    x: Tensor, weight: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """The convolution alone, with arguments and results as in the reference form, for the table of forms."""
    return convolve_fused(x, weight, None, key_mask=key_mask, cu_seqlens=cu_seqlens, initial=initial, out_dtype=x.dtype)


def convolve_fused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    residual: bool = False,
    activation: Activation = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial: Tensor | None = None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """All of ``short_convolution`` on raw inputs: x in its own dtype, with any values (NaN too) at masked tokens.

    ``x (B, T, C)``, ``weight (C, W)``, ``bias (C,)``, ``initial (N, W-1, C)`` or None for zeros. Returns
    ``y (B, T, C)`` and the last inputs ``(N, W-1, C)`` in the dtype of x.
    """
    past = weight.shape[1] - 1
    places = None
    if key_mask is not None or cu_seqlens is not None:
        places = lay_out(x, past, key_mask, cu_seqlens)
    table = None if places is None else places.table
    silu, masked = activation == "silu", key_mask is not None
    y = convolve_directly(x, weight, bias, initial, table, residual, silu, masked, out_dtype)
    n = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return y, last_inputs(x, initial, past, n, places)


def convolve_step(
    x_t: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: Tensor | None,
    *,
    residual: bool = False,
    activation: Activation = None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """One token ``x_t (B, C)`` after ``inputs (B, W-1, C)`` or None: returns ``y (B, C)`` and the next inputs."""
    given = [t for t in (x_t, weight, bias, inputs) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        y, inputs = convolve_fused(
            x_t.unsqueeze(1), weight, bias, residual=residual, activation=activation, initial=inputs,
            out_dtype=out_dtype,
        )  # fmt: skip
        return y.squeeze(1), inputs
    return convolution_step(x_t, weight, bias, inputs, residual, activation == "silu", out_dtype)


def convolve_step_(
    x_t: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    *,
    residual: bool = False,
    activation: Activation = None,
    out_dtype: torch.dtype,
) -> Tensor:
    """:func:`convolve_step` that overwrites ``inputs``, for decoding loops and CUDA graphs. It has no gradient."""
    given = [t for t in (x_t, weight, bias, inputs) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        raise RuntimeError("a step in place has no gradient: call it under torch.no_grad(), or use convolve_step")
    return convolution_step_in_place(x_t, weight, bias, inputs, residual, activation == "silu", out_dtype)
