"""The operators of bidirectional attention: schemas, shapes and gradients. A state is flat: S row by row, then z.

Maps travel as the six tensors of their two sides, two codes (-1: no maps), parts and flows; see ``Maps``.
"""

import torch
from torch import Tensor

from linattn.kernels.bidirectional import launch
from linattn.kernels.bidirectional.config import Inputs, Maps, Side, fits_one_program
from linattn.kernels.common.direct import shortest
from linattn.kernels.common.gradients import or_zeros
from linattn.kernels.common.layout import like_tokens
from linattn.kernels.common.replaying import replayed
from linattn.ops.shared.call import refuse_second_derivatives


def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, initial: Tensor | None,
    norm: int, eps: float, out_dtype: torch.dtype, need_state: bool,
    table_q: Tensor | None, token_q: Tensor | None, constant_q: Tensor | None,
    table_k: Tensor | None, token_k: Tensor | None, constant_k: Tensor | None,
    map_q: int, map_k: int, parts: int, flows: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output ``(B, H, Tq, V)`` and flat state ``(N, H_kv flows, K V / flows + K)``, empty if it is not needed."""
    maps = _maps(table_q, token_q, constant_q, table_k, token_k, constant_k, map_q, map_k, parts, flows)
    inputs = Inputs(q, k, v, key_mask, cu_seqlens, initial, norm, eps, maps)
    output, state = _allocate(inputs, out_dtype, need_state)
    launch.forward(inputs, output, state)
    return output, state


def _backward(
    d_output: Tensor, d_state: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None, initial: Tensor | None,
    table_q: Tensor | None, token_q: Tensor | None, constant_q: Tensor | None,
    table_k: Tensor | None, token_k: Tensor | None, constant_k: Tensor | None,
    state: Tensor, norm: int, eps: float, map_q: int, map_k: int, parts: int, flows: int, learn_q: bool, learn_k: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, the initial state, both maps' table, factors and constant; empty where there is none."""
    maps = _maps(table_q, token_q, constant_q, table_k, token_k, constant_k, map_q, map_k, parts, flows)
    inputs = Inputs(q, k, v, key_mask, cu_seqlens, initial, norm, eps, maps)
    d_initial = q.new_empty((0,) if initial is None else initial.shape, dtype=torch.float32)
    dq, dk, dv, of_query, of_key = launch.backward(inputs, d_output, d_state, state, d_initial, (learn_q, learn_k))
    return dq, dk, dv, d_initial, *of_query, *of_key


_forward, _backward = replayed(_forward), replayed(_backward)
bidirectional = torch.library.custom_op("linattn::bidirectional", _forward, mutates_args=())
bidirectional_backward = torch.library.custom_op("linattn::bidirectional_backward", _backward, mutates_args=())


def _maps(
    table_q: Tensor | None, token_q: Tensor | None, constant_q: Tensor | None,
    table_k: Tensor | None, token_k: Tensor | None, constant_k: Tensor | None,
    map_q: int, map_k: int, parts: int, flows: int,
) -> Maps | None:  # fmt: skip
    if map_q < 0:
        return None
    query, key = Side(map_q, table_q, token_q, constant_q), Side(map_k, table_k, token_k, constant_k)
    return Maps(query, key, parts, flows)


def _allocate(x: Inputs, out_dtype: torch.dtype, need_state: bool) -> tuple[Tensor, Tensor]:
    w, (B, H_kv) = x.widths, x.k.shape[:2]
    n = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    # A single program computes the state again in the backward pass.
    stored = need_state or not fits_one_program(x)
    state = x.q.new_empty((n, H_kv * w.flows, w.K * w.V + w.K) if stored else (0,), dtype=torch.float32)
    return like_tokens(x.q, x.v.shape[3], out_dtype), state


@bidirectional.register_fake
def _(  # type: ignore[no-untyped-def]
    q, k, v, key_mask, cu_seqlens, initial, norm, eps, out_dtype, need_state,
    table_q, token_q, constant_q, table_k, token_k, constant_k, map_q, map_k, parts, flows,
):  # fmt: skip
    maps = _maps(table_q, token_q, constant_q, table_k, token_k, constant_k, map_q, map_k, parts, flows)
    return _allocate(Inputs(q, k, v, key_mask, cu_seqlens, initial, norm, eps, maps), out_dtype, need_state)


@bidirectional_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    d_output, d_state, q, k, v, key_mask, cu_seqlens, initial,
    table_q, token_q, constant_q, table_k, token_k, constant_k, state,
    norm, eps, map_q, map_k, parts, flows, learn_q, learn_k,
):  # fmt: skip
    def grad(x: Tensor | None, needed: bool = True) -> Tensor:
        return q.new_empty((0,) if x is None or not needed else x.shape, dtype=torch.float32)

    raw = (like_tokens(x, x.shape[3]) for x in (q, k, v))
    of_query = grad(table_q, learn_q), grad(token_q), grad(constant_q)
    return *raw, grad(initial), *of_query, grad(table_k, learn_k), grad(token_k), grad(constant_k)


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, key_mask, cu_seqlens, initial, norm, eps, _, _, *sides, map_q, map_k, parts, flows = inputs
    ctx.save_for_backward(q, k, v, key_mask, cu_seqlens, initial, *sides, output[1])
    ctx.options = norm, eps, map_q, map_k, parts, flows
    # A state that nobody used has no gradient: None, rather than a tensor of zeros to read.
    ctx.set_materialize_grads(False)


def _gradients(ctx, d_output, d_state, run=bidirectional_backward):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # read once: gradient checkpointing returns them only once
    q, _, v, *_ = saved
    d_output = or_zeros(d_output, q, v.shape[3])
    needed = ctx.needs_input_grad
    found = run(d_output, d_state, *saved, *ctx.options, needed[10], needed[13])
    dq, dk, dv, d_initial, *of_maps = found
    of_maps = (grad if wanted else None for grad, wanted in zip(of_maps, needed[10:16], strict=True))
    return dq, dk, dv, None, None, d_initial if needed[5] else None, None, None, None, None, *of_maps, *[None] * 4


bidirectional.register_autograd(_gradients, setup_context=_remember)
refuse_second_derivatives(bidirectional_backward, "kernels")
attend = shortest(bidirectional, _forward, _backward, _remember, _gradients)
