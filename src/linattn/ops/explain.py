"""``explain``: which implementation a call takes, and why."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from linattn.ops.convolution import api as convolution
from linattn.ops.convolution.call import ConvolutionCall
from linattn.ops.exponential import api as exponential
from linattn.ops.exponential.call import ExponentialCall
from linattn.ops.hybrid import api as hybrid
from linattn.ops.hybrid.call import HybridCall
from linattn.ops.linear import api as linear
from linattn.ops.linear.call import LinearCall
from linattn.ops.shared.call import Choice

# What holds the arguments of each op's call, and the check and choice that a call begins with.
_CALLS: dict[Callable[..., Any], tuple[Callable[..., Any], Callable[[Any, str], Choice]]] = {
    linear.linear_attention: (LinearCall, linear.checked_choice),
    exponential.exponential_attention: (ExponentialCall, exponential.checked_choice),
    convolution.short_convolution: (ConvolutionCall, convolution.checked_choice),
    hybrid.hybrid_attention: (HybridCall, hybrid.checked_choice),
}


def explain(
    *inputs: Tensor, op: Callable[..., Any] = linear.linear_attention, impl: str = "auto", **options: Any
) -> Choice:
    """Which implementation ``op(*inputs, **options)`` takes, and why.

    The arguments are checked as in the real call, so wrong ones raise the same error. On a GPU ``auto`` takes kernels
    wherever they serve the call; where they do not, the reason says why. With the environment variable
    ``LINATTN_TRITON=0`` ``auto`` never takes kernels.

    Args:
        inputs: the tensors of the call, as ``op`` takes them: q, k, v.
        op: ``linear_attention``, ``exponential_attention``, ``hybrid_attention`` or ``short_convolution``.
        impl: as in ``op``.
        options: the other arguments of ``op``.

    Example:
        >>> import torch
        >>> from linattn import explain, short_convolution
        >>> q = torch.randn(1, 2, 16, 8)
        >>> explain(q, q, q, causal=True).impl
        'chunked'
        >>> explain(torch.randn(1, 16, 8), torch.randn(8, 4), op=short_convolution).impl
        'chunked'
    """
    if op not in _CALLS:
        names = ", ".join(known.__name__ for known in _CALLS)
        raise ValueError(f"op must be one of the functions {names}, got {op!r}")
    arguments, choose = _CALLS[op]
    return choose(arguments(*inputs, **options), impl)
