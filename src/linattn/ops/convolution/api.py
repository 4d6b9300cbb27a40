"""``short_convolution``: a causal depthwise convolution over the last few tokens.

y_t = act(sum_w weight[:, W-1-w] x_{t-w} + bias)   (+ x_t)
"""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from linattn.kernels.convolution import apply as kernels
from linattn.ops.convolution.call import (
    Activation,
    ConvolutionCall,
    ConvolutionState,
)
from linattn.ops.convolution.chunked import convolve as chunked
from linattn.ops.convolution.recurrent import convolve as recurrent
from linattn.ops.convolution.reference import convolve as reference
from linattn.ops.shared.call import check_tensor, chooser, compute_dtype, output_dtype, without_autocast

FORMS = {"reference": reference, "recurrent": recurrent, "chunked": chunked}
checked_choice = chooser(kernels, like="x")


class ConvolutionOutput(NamedTuple):
    """Output ``(B, T, C)`` together with the state after the last token."""

    output: Tensor
    state: ConvolutionState


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: bool = False,
    activation: Activation = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
    validate: bool | None = None,
) -> Tensor:
    """Causal depthwise convolution: each channel mixes its last W values.

    ``y_t = act(sum_{w=0}^{W-1} weight[:, W-1-w] x_{t-w} + bias)``, and ``+ x_t`` with ``residual``; before the first
    token x is 0. The last tap is the token's own, as in ``nn.Conv1d(C, C, W, groups=C).weight.squeeze(1)``.
    A Canon layer has only ``residual=True``; the short convolution inside GLA or Mamba has ``activation="silu"``.

    Args:
        x: ``(B, T, C)``.
        weight: ``(C, W)``, W >= 1.
        bias: ``(C,)`` or None.
        residual: whether to add x, after the activation.
        activation: ``"silu"`` or None.
        key_mask: ``(B, T)`` bool, True = real token. Masked tokens are skipped as if they did not exist: windows
            reach over them, and their own outputs are 0.
        cu_seqlens: ``(N+1,)`` offsets of N sequences packed into one row (B = 1); no window crosses a boundary.
        impl: ``"chunked"`` takes all tokens at once, ``"recurrent"`` one after another, ``"reference"`` is the
            definition, sequence by sequence; for ``"triton"`` and ``"auto"`` see :func:`explain`.
        validate: whether to check that the offsets are sorted, which costs a sync on a GPU. None: only on the CPU.

    Returns:
        ``(B, T, C)`` in the dtype of x (under autocast, in the dtype of autocast).

    Example:
        >>> import torch
        >>> from linattn import short_convolution
        >>> x = torch.tensor([[[1.0], [2.0], [3.0]]])
        >>> short_convolution(x, torch.tensor([[10.0, 1.0]])).flatten().tolist()
        [1.0, 12.0, 23.0]
    """
    call = ConvolutionCall(x, weight, bias, residual, activation, key_mask, cu_seqlens, validate)
    return _run(call, impl).output


def short_convolution_with_state(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: ConvolutionState | None = None,
    impl: str = "auto",
    **options: Any,
) -> ConvolutionOutput:
    """:func:`short_convolution` that starts from a state and also returns the state after the last token.

    ``options`` are those of :func:`short_convolution`. A sequence may be cut anywhere, also into pieces shorter than
    the window; if the state is handed over, the pieces give what the whole sequence gives. With ``cu_seqlens`` the
    state has one row per sequence.

    Example:
        >>> import torch
        >>> from linattn import short_convolution_with_state
        >>> x, weight = torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[10.0, 1.0]])
        >>> start, state = short_convolution_with_state(x[:, :1], weight)
        >>> end, state = short_convolution_with_state(x[:, 1:], weight, initial_state=state)
        >>> start.flatten().tolist(), end.flatten().tolist(), state.inputs.flatten().tolist()
        ([1.0], [12.0, 23.0], [3.0])
    """
    return _run(ConvolutionCall(x, weight, bias, initial_state=initial_state, **options), impl)


def short_convolution_step(
    x_t: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: ConvolutionState | None,
    *,
    residual: bool = False,
    activation: Activation = None,
) -> ConvolutionOutput:
    """One decoding step of :func:`short_convolution`: the output of one token and the next state.

    ``x_t (B, C)`` is the token; a state of None is empty. Returns the output ``(B, C)`` and the next state.

    Example:
        >>> import torch
        >>> from linattn import short_convolution_step
        >>> weight, state = torch.tensor([[10.0, 1.0]]), None
        >>> for x in (1.0, 2.0, 3.0):
        ...     output, state = short_convolution_step(torch.tensor([[x]]), weight, None, state)
        >>> output.item()
        23.0
    """
    check_tensor("x_t", x_t, "(B, C)", 2)
    call = ConvolutionCall(x_t.unsqueeze(1), weight, bias, residual, activation, initial_state=state)
    out = _run(call, "auto")
    return ConvolutionOutput(out.output.squeeze(1), out.state)


def _run(call: ConvolutionCall, impl: str) -> ConvolutionOutput:
    chosen, out_dtype = checked_choice(call, impl).impl, output_dtype(call.x)
    padding = None if call.key_mask is None else ~call.key_mask.unsqueeze(-1)
    with without_autocast(call.x):
        if chosen == "triton":
            y, final = kernels.convolve_call(call, out_dtype)
            return ConvolutionOutput(y, ConvolutionState(final))
        dtype = compute_dtype(call.x, call.weight)
        # Padding may hold anything, NaN included, and NaN times 0 is NaN.
        x = (call.x if padding is None else call.x.masked_fill(padding, 0)).to(dtype)
        y, final = FORMS[chosen](x, call.weight.to(dtype), call.key_mask, call.cu_seqlens, call.initial_inputs(dtype))
        if call.bias is not None:
            y = y + call.bias.to(dtype)
        if call.activation == "silu":
            y = F.silu(y)
        if call.residual:
            y = y + x
        if padding is not None:
            y = y.masked_fill(padding, 0)
    return ConvolutionOutput(y.to(out_dtype), ConvolutionState(final.to(call.x.dtype)))
