"""Launches of the kernels of a decay per channel: tensors in, tensors out, no autograd. ``plan`` has the choices."""

from dataclasses import replace

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from linattn.kernels.causal.device.normalizer_gradient import normalizer_gradient
from linattn.kernels.channel_decay.device.forward import forward_kernel
from linattn.kernels.channel_decay.device.key_grad import key_grad_kernel
from linattn.kernels.channel_decay.device.near import near_kernel
from linattn.kernels.channel_decay.device.near_grad import near_grad_kernel
from linattn.kernels.channel_decay.device.plan import (
    Cut,
    Inputs,
    Plan,
    Tiles,
    any_of,
    blocks_of,
    cut_up,
    flags,
    mask_strides,
    near_widths,
    no_chunks,
    options_of,
    parts_of,
    plan_for,
    programs_of,
    slots_of,
    strides_of,
    widths,
)
from linattn.kernels.channel_decay.device.query_grad import query_grad_kernel
from linattn.kernels.channel_decay.device.states import scan_states_kernel, segment_states_kernel
from linattn.kernels.channel_decay.device.value_grad import value_grad_kernel
from linattn.kernels.common.launching import launch


def forward(
    x: Inputs, kv_0: Tensor | None, z_0: Tensor | None, normalizer: int, eps: float, dtype: torch.dtype,
    need_state: bool, plan: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output (B, H, T, V), row sums (B, H, T) (empty without a normaliser), final states (empty unless needed)."""
    plan = plan or plan_for(x)
    B, H, T, K, V = x.sizes
    q, tiles = x.q, plan.forward
    parts = triton.cdiv(K, tiles.k)
    # A chunk of strong decay keeps its undivided sum there for a while, which fp16 may not hold.
    wide = parts > 1 or (normalizer and dtype == torch.float16)
    o = _room(q, parts, B, H, T, V, dtype=torch.float32 if wide else dtype)
    den = _room(q, parts, B, H, T) if normalizer else q.new_empty(0, dtype=torch.float32)
    den_state = torch.empty_like(den)
    kv, z = q.new_empty(0, dtype=torch.float32), q.new_empty(0, dtype=torch.float32)
    if need_state:
        kv, z = _first_states(x, kv_0, z_0)
    cut = cut_up(x, plan)
    if q.numel() == 0 or V == 0:
        o.zero_()
        den.zero_()
    else:
        start_kv, start_z = kv_0, z_0
        if cut.several:
            start_kv, start_z = segment_starts(x, cut, plan.states, kv_0, z_0, with_z=normalizer > 0 or need_state)
        slots = slots_of(x, cut, tiles)
        strong = q.new_full((parts, B, H, slots, 2), -1, dtype=torch.int64)
        strides = *strides_of(q, x.k, x.v, x.a), *mask_strides(x)
        mask = any_of(x.mask, q)
        launch(
            forward_kernel, programs_of(x, cut, tiles),
            q, x.k, x.v, x.a, mask, any_of(cut.table, q), any_of(start_kv, q), any_of(start_z, q), o, den, den_state,
            strong, kv, z, *strides, B, H, x.groups, T, cut.span, cut.segments, slots, eps, **widths(x, tiles),
            NORMALIZER=normalizer, **flags(x, cut), HAS_START=start_kv is not None, HAS_FINAL=need_state,
            **options_of(tiles),
        )  # fmt: skip
        near = replace(tiles, warps=plan.near.warps, stages=1)
        blocks, block = blocks_of(x, slots, near)
        launch(
            near_kernel, blocks,
            q, x.k, x.v, x.a, mask, o, den, den_state, strong, *strides, B, H, x.groups, T, slots, eps,
            **near_widths(x, near), BLOCK=block, NORMALIZER=normalizer, SHIFT=int(x.shift),
            MASKED=x.mask is not None, **options_of(near),
        )  # fmt: skip
    if parts == 1:
        return o.to(dtype), den, kv, z
    whole = o.sum(0)
    if normalizer:
        den = den.sum(0)
        whole /= (den + eps if normalizer == 1 else den.abs().clamp(min=1)).unsqueeze(-1)
    return whole.to(dtype), den, kv, z


def backward(
    x: Inputs, kv_0: Tensor | None, z_0: Tensor | None, o: Tensor, den: Tensor, kv_1: Tensor, z_1: Tensor,
    d_o: Tensor, d_kv_1: Tensor | None, d_z_1: Tensor | None, normalizer: int, eps: float, plan: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, a and of the initial state (empty where there is none)."""
    plan = plan or plan_for(x)
    _, H, _, K, V = x.sizes
    q, k, v, a, G = x.q, x.k, x.v, x.a, x.groups
    d_kv, d_z = q.new_empty(0, dtype=torch.float32), q.new_empty(0, dtype=torch.float32)
    if kv_0 is not None:
        shape = x.sequences, H, K
        d_kv, d_z = q.new_zeros(*shape, V, dtype=torch.float32), q.new_zeros(shape, dtype=torch.float32)
        if d_kv_1 is not None and d_z_1 is not None:  # sequences without tokens hand it on
            d_kv[:, ::G], d_z[:, ::G] = d_kv_1, d_z_1
    if q.numel() == 0 or V == 0:
        found = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, a)]
    else:
        found = _sweeps(x, kv_0, z_0, o, den, kv_1, z_1, d_o, d_kv_1, d_z_1, d_kv, d_z, normalizer, eps, plan)
    if kv_0 is not None and G > 1:
        d_kv, d_z = d_kv.unflatten(1, (-1, G)).sum(2), d_z.unflatten(1, (-1, G)).sum(2)
    dq, dk, dv, da = found
    return dq, dk, dv, da, d_kv, d_z


def _sweeps(
    x: Inputs, kv_0: Tensor | None, z_0: Tensor | None, o: Tensor, den: Tensor, kv_1: Tensor, z_1: Tensor,
    d_o: Tensor, d_kv_1: Tensor | None, d_z_1: Tensor | None, d_kv: Tensor, d_z: Tensor, normalizer: int, eps: float,
    plan: Plan,
) -> list[Tensor]:  # fmt: skip
    B, H, T, K, V = x.sizes
    q, k, v, a, G = x.q, x.k, x.v, x.a, x.groups
    scale, e = _delta(o, d_o, den, normalizer, eps) if normalizer else (q, q)
    cut, tiles, values = cut_up(x, plan), plan.key_grad, plan.value_grad
    # What it notes in da is for key_grad, and ``strong`` is true of both.
    queries = replace(tiles, warps=plan.query_grad.warps, stages=plan.query_grad.stages)
    start_kv, start_z, end_kv, end_z = kv_0, z_0, d_kv_1, d_z_1
    if cut.several:
        with_z = normalizer > 0 or d_z_1 is not None
        start_kv, start_z = segment_starts(x, cut, plan.states, kv_0, z_0, with_z=with_z)
        end_kv, end_z = _segment_ends(x, cut, plan.states, d_o, scale, e, d_kv_1, d_z_1, bool(normalizer))
    NV, slots = triton.cdiv(V, tiles.v), slots_of(x, cut, tiles)
    whole = NV == 1 and G == 1
    dq = _room(q, NV, B, H, T, K, dtype=q.dtype if NV == 1 else torch.float32)
    dk = _room(q, NV, B, H, T, K, dtype=q.dtype if whole else torch.float32)
    da = _room(q, NV, B, H, T, K)
    NK = triton.cdiv(K, values.k)
    dv = _room(q, NK, B, H, T, V, dtype=v.dtype if NK == 1 and G == 1 else torch.float32)
    mask, table = any_of(x.mask, q), any_of(cut.table, q)
    inputs = q, k, v, a, d_o, scale, e, mask
    strides = *strides_of(q, k, v, a, d_o), *mask_strides(x)
    sizes = B, H, G, T, cut.span, cut.segments
    normalized, has_end = bool(normalizer), d_kv_1 is not None
    strong = no_chunks(x, cut, tiles)
    launch(
        query_grad_kernel, programs_of(x, cut, queries),
        *inputs, table, any_of(start_kv, q), any_of(start_z, q), dq, da, strong, *strides, *sizes, slots,
        **widths(x, queries), NORMALIZED=normalized, **flags(x, cut), HAS_START=start_kv is not None,
        **options_of(queries),
    )  # fmt: skip
    launch(
        key_grad_kernel, programs_of(x, cut, tiles),
        *inputs, table, any_of(start_kv, q), any_of(start_z, q), kv_1, z_1, any_of(end_kv, q), any_of(end_z, q),
        dk, da, strong, d_kv, d_z, *strides, *sizes, slots, **widths(x, tiles),
        NORMALIZED=normalized, **flags(x, cut), HAS_START=kv_0 is not None, HAS_END=has_end, **options_of(tiles),
    )  # fmt: skip
    strong_values = no_chunks(x, cut, values)
    launch(
        value_grad_kernel, programs_of(x, cut, values),
        q, k, a, d_o, scale, mask, table, any_of(end_kv, q), dv, strong_values,
        *strides_of(q, k, a, d_o), *mask_strides(x), *sizes, slots_of(x, cut, values),
        **widths(x, values), NORMALIZED=normalized, **flags(x, cut), HAS_END=has_end, **options_of(values),
    )  # fmt: skip
    for of_values, noted, those in ((False, strong, tiles), (True, strong_values, values)):
        near = replace(those, warps=plan.near.warps, stages=1)
        blocks, block = blocks_of(x, noted.shape[4], near)
        launch(
            near_grad_kernel, blocks,
            *inputs, dq, dk, dv, da, noted, *strides, B, H, G, T, noted.shape[4], **near_widths(x, near), BLOCK=block,
            NORMALIZED=normalized, OF_VALUES=of_values,
            SHIFT=int(x.shift), MASKED=x.mask is not None, **options_of(near),
        )  # fmt: skip
    return [
        _added(dq, 1, q.dtype), _added(dk, G, k.dtype), _added(dv, G, v.dtype), _added(da, G, a.dtype),
    ]  # fmt: skip


def segment_starts(
    x: Inputs, cut: Cut, tiles: Tiles, kv_0: Tensor | None, z_0: Tensor | None, *, with_z: bool
) -> tuple[Tensor, Tensor]:
    """The state before each segment, kv (B H_kv segments, K, V) and, where it is wanted, z (.., K)."""
    B, T, none = x.sizes[0], x.sizes[2], x.k
    kv, z, total = _segment_buffers(x, cut, x.k.shape[1])
    launch(
        segment_states_kernel, B * x.k.shape[1] * cut.segments * parts_of(x, tiles),
        x.k, x.v, x.a, none, none, any_of(x.mask, x.k), any_of(cut.table, x.k), kv, z, total,
        *strides_of(x.k, x.v, x.a), *mask_strides(x), x.k.shape[1], 1, T, cut.span, cut.segments,
        **widths(x, tiles), REVERSE=False, NORMALIZED=with_z, SHIFT=int(x.shift), MASKED=x.mask is not None,
        PACKED=cut.table is not None, **options_of(tiles),
    )  # fmt: skip
    _scan(x, cut, tiles, kv, z, total, kv_0, z_0, x.k.shape[1], 1, reverse=False)
    return kv, z


def _segment_ends(
    x: Inputs, cut: Cut, tiles: Tiles, d_o: Tensor, scale: Tensor, e: Tensor, d_kv_1: Tensor | None,
    d_z_1: Tensor | None, normalized: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of the state after each segment, by query head."""
    B, H, T, _, _ = x.sizes
    kv, z, total = _segment_buffers(x, cut, H)
    launch(
        segment_states_kernel, B * H * cut.segments * parts_of(x, tiles),
        x.q, d_o, x.a, scale, e, any_of(x.mask, x.q), any_of(cut.table, x.q), kv, z, total,
        *strides_of(x.q, d_o, x.a), *mask_strides(x), H, x.groups, T, cut.span, cut.segments,
        **widths(x, tiles), REVERSE=True, NORMALIZED=normalized, SHIFT=int(x.shift), MASKED=x.mask is not None,
        PACKED=cut.table is not None, **options_of(tiles),
    )  # fmt: skip
    _scan(x, cut, tiles, kv, z, total, d_kv_1, d_z_1, H, x.groups, reverse=True)
    return kv, z


def _segment_buffers(x: Inputs, cut: Cut, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    B, _, _, K, V = x.sizes
    rows = B * heads * cut.segments
    kv = x.q.new_empty(rows, K, V, dtype=torch.float32)
    return kv, x.q.new_empty(rows, K, dtype=torch.float32), x.q.new_empty(rows, K, dtype=torch.float32)


def _scan(
    x: Inputs, cut: Cut, tiles: Tiles, kv: Tensor, z: Tensor, total: Tensor, kv_0: Tensor | None, z_0: Tensor | None,
    heads: int, step: int, *, reverse: bool,
) -> None:  # fmt: skip
    _, _, _, K, V = x.sizes
    # The scan is a chain of loads: many programs hide their latency.
    small = replace(tiles, k=min(tiles.k, 32), v=min(tiles.v, 64))
    launch(
        scan_states_kernel, x.q.shape[0] * heads * parts_of(x, small),
        kv, z, total, any_of(kv_0, x.q), any_of(z_0, x.q), any_of(cut.table, x.q), heads, cut.segments,
        K=K, V=V, BK=small.k, BV=small.v, NK=triton.cdiv(K, small.k), NV=triton.cdiv(V, small.v), REVERSE=reverse,
        PACKED=cut.table is not None, HAS_START=kv_0 is not None, STEP=step, num_warps=4,
    )  # fmt: skip


def _delta(o: Tensor, d_o: Tensor, den: Tensor, normalizer: int, eps: float) -> tuple[Tensor, Tensor]:
    _, H, T, V = o.shape
    scale, e = torch.empty_like(den), torch.empty_like(den)
    width = max(16, triton.next_power_of_2(V))
    rows = max(1, 4096 // width)
    launch(
        normalizer_gradient, triton.cdiv(den.numel(), rows),
        o, *o.stride(), d_o, *d_o.stride(), den, scale, e, H, T, den.numel(), eps,
        V=V, BV=width, C=rows, NORMALIZER=normalizer, TIMES_N=False, num_warps=4,
    )  # fmt: skip
    return scale, e


def _first_states(x: Inputs, kv_0: Tensor | None, z_0: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where final states go: a sequence without tokens keeps the one it came with."""
    shape = x.sequences, x.k.shape[1], x.k.shape[3]
    if kv_0 is None or z_0 is None:
        kv = x.k.new_zeros(*shape, x.v.shape[3], dtype=torch.float32)
        return kv, x.k.new_zeros(shape, dtype=torch.float32)
    return kv_0.clone(memory_format=torch.contiguous_format), z_0.clone(memory_format=torch.contiguous_format)


def _room(like: Tensor, parts: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(parts, *shape), or of one part that alone: what is handed out is no view then."""
    return like.new_empty(shape if parts == 1 else (parts, *shape), dtype=dtype)


def _added(parts: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """(parts, B, H, T, ..), or (B, H, T, ..) of one, summed over parts and over the query heads of a group."""
    several = (0,) if parts.ndim == 5 else ()
    if groups > 1:
        parts = parts.unflatten(-3, (-1, groups)).sum((*several, -3))
    elif several:
        parts = parts.sum(0)
    return parts.to(dtype)
