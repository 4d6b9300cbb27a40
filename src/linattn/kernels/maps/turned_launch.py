"""Launches of the kernels of maps with turned features."""

from typing import Any, NamedTuple

from torch import Tensor

from linattn.kernels.bidirectional.short import mask_of
from linattn.kernels.common.launching import launch
from linattn.kernels.maps.library import TILE, WARPS, WARPS_BACKWARD, Tiles, constants, shared, tiles_for


class Turned(NamedTuple):
    """The inputs of a map with turned features: x ``(B, H, T, D)``, key_mask ``(B, T)``, cos and sin ``(T, W / 2)``.

    z ``(B, H_kv flows, parts D)`` is given for queries only. group: heads of x that share a key head. The other fields
    are those of a ``Twin``.
    """

    x: Tensor
    z: Tensor | None
    key_mask: Tensor | None
    cos: Tensor
    sin: Tensor
    table: Tensor | None
    token: Tensor | None
    eps: float
    code: int
    parts: int
    flows: int
    group: int

    @property
    def tiles(self) -> Tiles:
        return tiles_for(self.x, self.parts)

    @property
    def backward_tiles(self) -> Tiles:
        """Tiles of queries have half as many tokens: features, sums and gradients would take up to 148 registers."""
        return self.tiles if self.z is None else tiles_for(self.x, self.parts, TILE // 2)


def launch_forward(inputs: Turned, out: Tensor, partial: Tensor) -> None:
    from linattn.kernels.maps.device.turned_forward import turned_forward

    B, H, T, _ = inputs.x.shape
    given, strides, sizes = _given(inputs, out, inputs.tiles)
    launch(
        turned_forward, B * H * inputs.flows * inputs.tiles.per_head,
        *given, out, partial, inputs.eps, *strides, *out.stride()[:3], T, H, **sizes, num_warps=WARPS,
    )  # fmt: skip


def launch_backward(
    inputs: Turned, d_out: Tensor, d_total: Tensor, dx: Tensor, d_z: Tensor, d_table: Tensor, d_token: Tensor
) -> None:
    from linattn.kernels.maps.device.turned_backward import turned_backward

    B, H, T, _ = inputs.x.shape
    d_out = d_out if d_out.stride(3) == 1 else d_out.contiguous()
    given, strides, sizes = _given(inputs, dx, inputs.backward_tiles)
    launch(
        turned_backward, B * H * inputs.backward_tiles.per_head,
        *given, d_out, d_total, dx, d_z, d_table, d_token, inputs.eps,
        *strides, *d_out.stride()[:3], *dx.stride()[:3], T, H, **sizes,
        LEARNS=d_table.numel() > 0, num_warps=WARPS_BACKWARD,
    )  # fmt: skip


def _given(inputs: Turned, other: Tensor, tiles: Tiles) -> tuple[list[Tensor], list[int], dict[str, Any]]:
    """The tensors that both kernels read, with any pointer for absent ones; their strides; the constants."""
    x, table, token = inputs.x, inputs.table, inputs.token
    table, strides, groups = shared(x, table, token, inputs.flows)
    mask, mask_strides = mask_of(inputs.key_mask, other)
    z = other if inputs.z is None else inputs.z.contiguous()
    turns = inputs.cos.contiguous(), inputs.sin.contiguous()
    given = [x, z, mask, *turns, other if table is None else table, other if token is None else token]
    sizes = groups | constants(x, inputs.code, token, inputs.flows, tiles)
    sizes |= {"GROUP": inputs.group, "W": 2 * inputs.cos.shape[1]}
    sizes |= {"HAS_MASK": inputs.key_mask is not None, "IS_QUERY": inputs.z is not None}
    return given, [*x.stride(), *mask_strides, *strides], sizes
