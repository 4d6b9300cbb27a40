"""The kernels of feature maps as operators of torch's library."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.kernels.common.direct import shortest
from linattn.kernels.common.launching import launch
from linattn.kernels.common.support import MAP_CODES
from linattn.ops.shared.call import refuse_second_derivatives

# Numbers of a tile of features: as many as the threads of a program, in backward of twice as many, hold in registers.
TILE = 32 * 128
WARPS, WARPS_BACKWARD = 4, 8
LEARNS = tuple(
    MAP_CODES[name]
    for name in ("pair_relu", "split_power", "split_expm1", "squares", "squares_and_linear", "shifted_power")
)


class Tiles(NamedTuple):
    """Tokens and columns of a tile, and how many tiles a head has."""

    BT: int
    BF: int
    per_head: int


def tiles_for(x: Tensor, parts: int, numbers: int = TILE) -> Tiles:
    BF = parts * max(2, 1 << (x.shape[3] - 1).bit_length())
    BT = max(1, min(64, numbers // BF))
    return Tiles(BT, BF, -(-x.shape[2] // BT))


def _forward(
    x: Tensor, table: Tensor | None, token: Tensor | None, constant: Tensor | None,
    code: int, parts: int, flows: int, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The features ``(B, H flows, T, parts D [+ 1])``."""
    out = torch.empty(_shape(x, constant, parts, flows), dtype=out_dtype, device=x.device)
    if out.numel():
        launch_forward(x, table, token, constant, code, parts, flows, out)
    return out


def _backward(
    d_out: Tensor, x: Tensor, table: Tensor | None, token: Tensor | None, constant: Tensor | None,
    code: int, parts: int, flows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, table, token and constant; empty if the tensor is absent or needs none."""
    (B, H, T, D), tiles = x.shape, tiles_for(x, parts)
    learns = table is not None and code in LEARNS
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts_of_table = x.new_empty((B, H, flows, tiles.per_head, 2, parts * D) if learns else 0, dtype=torch.float32)
    d_token = x.new_empty(0 if token is None else (B, H, T), dtype=torch.float32)
    if dx.numel():
        launch_backward(d_out, x, table, token, code, parts, flows, dx, parts_of_table, d_token)
    d_table = parts_of_table.sum(3).flatten(1, 2) if learns else parts_of_table
    d_constant = d_out[..., -1].sum(dtype=torch.float32) if constant is not None else x.new_empty(0)
    return (
        dx,
        sum_to(d_table, table.shape[:2], flows).to(table.dtype) if table is not None and learns else d_table,
        d_token if token is None else sum_to(d_token, token.shape[:2], 1).to(token.dtype),
        d_constant if constant is None else d_constant.to(constant.dtype),
    )


mapped = torch.library.custom_op("linattn::triton_map", _forward, mutates_args=())
mapped_backward = torch.library.custom_op("linattn::triton_map_backward", _backward, mutates_args=())


@mapped.register_fake
def _(x, table, token, constant, code, parts, flows, out_dtype):  # type: ignore[no-untyped-def]
    return x.new_empty(_shape(x, constant, parts, flows), dtype=out_dtype)


@mapped_backward.register_fake
def _(d_out, x, table, token, constant, code, parts, flows):  # type: ignore[no-untyped-def]
    def like(p: Tensor | None, exists: bool = True) -> Tensor:
        if p is None or not exists:
            return x.new_empty(0, dtype=torch.float32)
        return p.new_empty(p.shape)

    dx = x.new_empty(x.shape)
    none = x.new_empty(0)
    return dx, like(table, code in LEARNS), like(token), none if constant is None else constant.new_empty(())


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, table, token, constant, *options, _ = inputs
    ctx.save_for_backward(x, table, token, constant)
    ctx.options = options


def _gradients(ctx, d_out, run=mapped_backward):  # type: ignore[no-untyped-def]
    x, table, token, constant = ctx.saved_tensors
    dx, d_table, d_token, d_constant = run(d_out, x, table, token, constant, *ctx.options)
    learns = table is not None and ctx.options[0] in LEARNS
    given = d_table if learns else None, None if token is None else d_token, None if constant is None else d_constant
    return dx, *given, None, None, None, None


mapped.register_autograd(_gradients, setup_context=_remember)
refuse_second_derivatives(mapped_backward, "kernels")
map_directly = shortest(mapped, _forward, _backward, _remember, _gradients)


def launch_forward(
    x: Tensor, table: Tensor | None, token: Tensor | None, constant: Tensor | None,
    code: int, parts: int, flows: int, out: Tensor,
) -> None:  # fmt: skip
    from linattn.kernels.maps.device.forward import map_forward

    (B, H, T, _), tiles = x.shape, tiles_for(x, parts)
    table, strides, sizes = shared(x, table, token, flows)
    launch(
        map_forward, B * H * flows * tiles.per_head,
        x, out if table is None else table, out if token is None else token, out if constant is None else constant, out,
        *x.stride(), *strides, T, H, **sizes, **constants(x, code, token, flows, tiles),
        HAS_CONSTANT=constant is not None, num_warps=WARPS,
    )  # fmt: skip


def launch_backward(
    d_out: Tensor, x: Tensor, table: Tensor | None, token: Tensor | None, code: int, parts: int, flows: int,
    dx: Tensor, d_table: Tensor, d_token: Tensor,
) -> None:  # fmt: skip
    from linattn.kernels.maps.device.backward import map_backward

    (B, H, T, _), tiles = x.shape, tiles_for(x, parts)
    d_out = d_out if d_out.stride(3) == 1 else d_out.contiguous()
    table, strides, sizes = shared(x, table, token, flows)
    launch(
        map_backward, B * H * tiles.per_head,
        x, dx if table is None else table, dx if token is None else token, d_out, dx, d_table, d_token,
        *x.stride(), *strides, *d_out.stride()[:3], T, H, **sizes, **constants(x, code, token, flows, tiles),
        num_warps=WARPS_BACKWARD,
    )  # fmt: skip


def constants(x: Tensor, code: int, token: Tensor | None, flows: int, tiles: Tiles) -> dict[str, Any]:
    sizes = {"FLOWS": flows, "D": x.shape[3], "BT": tiles.BT, "BF": tiles.BF}
    return sizes | {"MAP": code, "HAS_TOKEN": token is not None}


def shared(
    x: Tensor, table: Tensor | None, token: Tensor | None, flows: int
) -> tuple[Tensor | None, list[int], dict[str, int]]:
    """The table with contiguous rows; its strides by sequence and virtual head; those of factors; who shares each."""
    H, strides, sizes = x.shape[1], [0] * 5, {"TABLE_GROUP": 1, "TOKEN_GROUP": 1}
    if table is not None:
        if table.stride()[2:] != (table.shape[3], 1):
            table = table.contiguous()
        strides[:2] = (0 if table.shape[i] == 1 else table.stride(i) for i in range(2))
        sizes["TABLE_GROUP"] = 1 if table.shape[1] == 1 else H * flows // table.shape[1]
    if token is not None:
        strides[2:] = (0 if token.shape[i] == 1 else token.stride(i) for i in range(3))
        sizes["TOKEN_GROUP"] = H // token.shape[1]
    return table, strides, sizes


def _shape(x: Tensor, constant: Tensor | None, parts: int, flows: int) -> tuple[int, int, int, int]:
    B, H, T, D = x.shape
    return B, H * flows, T, parts * D + int(constant is not None)  # a bool would break symbolic sizes


def sum_to(x: Tensor, shape: torch.Size, flows: int) -> Tensor:
    """Sum ``(B, H flows, ..)`` to ``(1 or B, heads, ..)`` over all that share a number; flows apart if heads > 1."""
    batch, heads = shape
    x = x.sum(0, keepdim=True) if batch == 1 else x
    if heads == 1:
        return x.sum(1, keepdim=True)
    return x.unflatten(1, (heads // flows, -1, flows)).sum(2).flatten(1, 2)
