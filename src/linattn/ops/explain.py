"""``explain``: which implementation a call takes, and why."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from linattn.ops.convolution import api as convolution
from linattn.ops.exponential import api as exponential
from linattn.ops.hybrid import api as hybrid
from linattn.ops.linear import api as linear
from linattn.ops.reflection import api as reflection
from linattn.ops.shared.choice import Choice

_EXPLAINED: dict[Callable[..., Any], Callable[..., Choice]] = {
    linear.linear_attention: linear.explain,
    exponential.exponential_attention: exponential.explain_exponential,
    convolution.short_convolution: convolution.explain_convolution,
    hybrid.hybrid_attention: hybrid.explain_hybrid,
    reflection.reflect_heads: reflection.explain_reflection,
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
        op: ``linear_attention``, ``exponential_attention``, ``hybrid_attention``, ``short_convolution`` or
            ``reflect_heads``.
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
    if op not in _EXPLAINED:
        names = ", ".join(known.__name__ for known in _EXPLAINED)
        raise ValueError(f"op must be one of the functions {names}, got {op!r}")
    return _EXPLAINED[op](*inputs, impl=impl, **options)
