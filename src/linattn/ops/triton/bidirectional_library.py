"""The operators of bidirectional attention: schemas, shapes and gradients. A state is flat: S row by row, then z."""

import torch
from torch import Tensor

from linattn.ops.triton import bidirectional_launch as launch
from linattn.ops.triton.bidirectional_config import Inputs, saves_state


@torch.library.custom_op("linattn::bidirectional", mutates_args=())
def bidirectional(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, initial: Tensor | None,
    norm: int, eps: float, out_dtype: torch.dtype, need_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output ``(B, H, Tq, V)`` and flat state ``(N, H_kv, K V + K)``, empty where nobody needs it."""
    output, state = _allocate(q, k, v, cu_seqlens, out_dtype, need_state)
    launch.forward(Inputs(q, k, v, key_mask, cu_seqlens, initial, norm, eps), output, state)
    return output, state


@torch.library.custom_op("linattn::bidirectional_backward", mutates_args=())
def bidirectional_backward(
    d_output: Tensor, d_state: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, initial: Tensor | None,
    state: Tensor, norm: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and the initial state (empty where there is none)."""
    grads = _allocate_gradients(q, k, v, initial)
    inputs = Inputs(q, k, v, key_mask, cu_seqlens, initial, norm, eps)
    launch.backward(inputs, d_output, d_state, state, *grads)
    return grads


def _allocate(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, out_dtype: torch.dtype, need_state: bool
) -> tuple[Tensor, Tensor]:
    (B, H_kv, _, K), V = k.shape, v.shape[3]
    n = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    stored = need_state or saves_state(q, k, v, cu_seqlens)
    state = q.new_empty((n, H_kv, K * V + K) if stored else (0,), dtype=torch.float32)
    return q.new_empty((*q.shape[:3], V), dtype=out_dtype), state


def _allocate_gradients(
    q: Tensor, k: Tensor, v: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_initial = q.new_empty((0,) if initial is None else initial.shape, dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_initial


@bidirectional.register_fake
def _(q, k, v, key_mask, cu_seqlens, initial, norm, eps, out_dtype, need_state):  # type: ignore[no-untyped-def]
    return _allocate(q, k, v, cu_seqlens, out_dtype, need_state)


@bidirectional_backward.register_fake
def _(d_output, d_state, q, k, v, key_mask, cu_seqlens, initial, state, norm, eps):  # type: ignore[no-untyped-def]
    return _allocate_gradients(q, k, v, initial)


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, key_mask, cu_seqlens, initial, norm, eps, _, _ = inputs
    ctx.save_for_backward(q, k, v, key_mask, cu_seqlens, initial, output[1])
    ctx.options = norm, eps
    # A state that nobody used has no gradient: None, rather than a tensor of zeros to read.
    ctx.set_materialize_grads(False)


def _gradients(ctx, d_output, d_state):  # type: ignore[no-untyped-def]
    q, _, v, *_, initial, _ = ctx.saved_tensors
    if d_output is None:
        d_output = q.new_zeros(()).expand(*q.shape[:3], v.shape[3])
    dq, dk, dv, d_initial = bidirectional_backward(d_output, d_state, *ctx.saved_tensors, *ctx.options)
    return dq, dk, dv, None, None, None if initial is None else d_initial, None, None, None, None


bidirectional.register_autograd(_gradients, setup_context=_remember)
