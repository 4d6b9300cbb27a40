"""Feature maps with turned features as an operator of torch's library.

Keys come first: their features are summed before they are turned. The features of queries are divided by the row sum,
their product with the sum of keys, so that only attention without a normaliser is left to do.
"""

import torch
from torch import Tensor

from linattn.kernels.common.direct import shortest
from linattn.kernels.common.gradients import or_zeros
from linattn.kernels.common.layout import like_tokens
from linattn.kernels.maps.library import LEARNS, sum_to
from linattn.kernels.maps.turned_launch import Turned, launch_backward, launch_forward
from linattn.ops.shared.call import refuse_second_derivatives


def _forward(
    x: Tensor, z: Tensor | None, key_mask: Tensor | None, cos: Tensor, sin: Tensor, table: Tensor | None,
    token: Tensor | None, eps: float, code: int, parts: int, flows: int, group: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Features ``(B, H flows, T, parts D)`` in the order of x, and the sums ``(B, H flows, parts D)`` of keys (no z).

    Keys: ``R psi`` and ``sum psi``; queries: ``R phi / (phi . z + eps)`` and nothing.
    """
    inputs = Turned(x, z, key_mask, cos, sin, table, token, eps, code, parts, flows, group)
    out, partial = _allocate(inputs)
    launch_forward(inputs, out, partial)
    return out, partial if z is not None else _summed(partial, 1)


def _backward(
    d_out: Tensor, d_total: Tensor | None, x: Tensor, z: Tensor | None, key_mask: Tensor | None, cos: Tensor,
    sin: Tensor, table: Tensor | None, token: Tensor | None, eps: float, code: int, parts: int, flows: int, group: int,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, z, table (if it is learned) and token; empty for absent tensors."""
    inputs = Turned(x, z, key_mask, cos, sin, table, token, eps, code, parts, flows, group)
    (B, H, T, D), tiles = x.shape, inputs.backward_tiles.per_head
    dx = like_tokens(x, D)
    d_z = x.new_empty((0,) if z is None else (B, H * flows, tiles, parts * D), dtype=torch.float32)
    d_table = x.new_empty((B, H, flows, tiles, 2, parts * D) if learns else (0,), dtype=torch.float32)
    d_token = x.new_empty((0,) if token is None else (B, H, T), dtype=torch.float32)
    if d_total is None:
        d_total = d_z if z is not None else x.new_zeros((B, H * flows, parts * D), dtype=torch.float32)
    launch_backward(inputs, d_out, d_total.contiguous(), dx, d_z, d_table, d_token)
    if z is not None:
        d_z = _summed(d_z, group)
    if table is not None and learns:
        d_table = sum_to(d_table.sum(3).flatten(1, 2), table.shape[:2], flows).to(table.dtype)
    if token is not None:
        d_token = sum_to(d_token, token.shape[:2], 1).to(token.dtype)
    return dx, d_z, d_table, d_token


turned = torch.library.custom_op("linattn::triton_turned_map", _forward, mutates_args=())
turned_backward = torch.library.custom_op("linattn::triton_turned_map_backward", _backward, mutates_args=())


def _allocate(x: Turned) -> tuple[Tensor, Tensor]:
    """Memory for the features, and for what each tile of keys adds to their sums."""
    B, H, _, D = x.x.shape
    out = like_tokens(x.x, x.parts * D, heads=H * x.flows)
    shape = (B, H * x.flows, x.tiles.per_head, x.parts * D)
    return out, x.x.new_empty((0,) if x.z is not None else shape, dtype=torch.float32)


def _summed(partial: Tensor, group: int) -> Tensor:
    """Sum ``(B, heads group, tiles, F) -> (B, heads, F)`` over tiles and the heads of a group, in a fixed order."""
    if partial.shape[2] * group == 1:
        return partial.squeeze(2)
    return partial.unflatten(1, (-1, group)).sum((2, 3))


@turned.register_fake
def _(x, z, key_mask, cos, sin, table, token, eps, code, parts, flows, group):  # type: ignore[no-untyped-def]
    out, partial = _allocate(Turned(x, z, key_mask, cos, sin, table, token, eps, code, parts, flows, group))
    return out, partial if z is not None else partial[:, :, 0].contiguous()


@turned_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    d_out, d_total, x, z, key_mask, cos, sin, table, token, eps, code, parts, flows, group, learns
):
    def like(p: Tensor | None) -> Tensor:
        return x.new_empty(0, dtype=torch.float32) if p is None else p.new_empty(p.shape)

    return like_tokens(x, x.shape[3]), like(z), like(table if learns else None), like(token)


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]
    # Queries have no sums, and those of keys may be unused: their gradient is None rather than zeros to read.
    ctx.set_materialize_grads(False)


def _gradients(ctx, d_out, d_total, run=turned_backward):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    x, z, *_, table, token = saved
    _, code, parts, flows, _ = ctx.options
    if d_out is None:
        like = x if flows == 1 else x.repeat_interleave(flows, dim=1)
        d_out = or_zeros(None, like, parts * x.shape[3])
    learns = table is not None and code in LEARNS and ctx.needs_input_grad[5]
    dx, d_z, d_table, d_token = run(d_out, d_total if z is None else None, *saved, *ctx.options, learns)
    given = d_table if learns else None, d_token if token is not None else None
    return dx, d_z if z is not None else None, None, None, None, *given, *[None] * 5


turned.register_autograd(_gradients, setup_context=_remember)
refuse_second_derivatives(turned_backward, "kernels")
turn_directly = shortest(turned, _forward, _backward, _remember, _gradients)
