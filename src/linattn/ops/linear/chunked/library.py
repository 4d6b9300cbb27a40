"""The chunked passes as operators of torch's library: one node for autograd and torch.compile, whatever the length."""

import torch
from torch import Tensor

from linattn.ops.linear.chunked import scan, scan_backward, total
from linattn.ops.linear.chunked.blocks import Scan
from linattn.ops.shared.derivatives import refuse_second_derivatives


@torch.library.custom_op("linattn::chunk_scan", mutates_args=())
def chunk_scan(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, log_decay: Tensor | None, cu_seqlens: Tensor | None,
    chunk: int, key_index: bool, strict: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Causal sums from the state ``kv (N, H_kv, K, V), z (N, H_kv, K)``: numerator, denominator, next state."""
    kv, z = _copies(kv, z)
    with _exact(q):
        inputs = Scan(*_rows(q, k, v, log_decay), cu_seqlens, chunk, key_index, strict, kv.dtype)
        num, den = scan.forward(inputs, *_state_rows(kv, z))
    return num.view(*q.shape[:3], v.shape[3]), den.view(q.shape[:3]), kv, z


@torch.library.custom_op("linattn::chunk_scan_backward", mutates_args=())
def chunk_scan_backward(
    d_num: Tensor, d_den: Tensor, d_kv: Tensor, d_z: Tensor,
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, log_decay: Tensor | None, cu_seqlens: Tensor | None,
    chunk: int, key_index: bool, strict: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, kv, z and log_decay (empty where there is none)."""
    kv, z, d_kv, d_z = _copies(kv, z, d_kv, d_z)
    with _exact(q):
        inputs = Scan(*_rows(q, k, v, log_decay), cu_seqlens, chunk, key_index, strict, kv.dtype)
        d_num, d_den = d_num.reshape(*inputs.q.shape[:3], v.shape[3]), d_den.reshape(*inputs.q.shape[:3], 1)
        found = scan_backward.backward(inputs, *_state_rows(kv, z), d_num, d_den, *_state_rows(d_kv, d_z))
    if log_decay is None or found.log_decay is None:
        da = q.new_empty(0)
    else:
        da = found.log_decay
        da = da.view(-1, log_decay.shape[0]).sum(0) if log_decay.ndim == 1 else da.view(log_decay.shape)
        da = da.to(log_decay.dtype)
    return found.q.view(q.shape), found.k.view(k.shape), found.v.view(v.shape), d_kv, d_z, da


@torch.library.custom_op("linattn::total", mutates_args=())
def total_sums(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bidirectional sums: numerator, denominator and the state with all keys added."""
    kv, z = _copies(kv, z)
    with _exact(q):
        num, den = total.forward(*_grouped(q, k, v), cu_seqlens, *_grouped_state(kv, z))
    return num.flatten(1, 2), den.flatten(1, 2), kv, z


@torch.library.custom_op("linattn::total_backward", mutates_args=())
def total_backward(
    d_num: Tensor, d_den: Tensor, d_kv: Tensor, d_z: Tensor,
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and the initial state, given the final state ``kv, z``."""
    d_kv, d_z = _copies(d_kv, d_z)
    with _exact(q):
        outer = d_num.unflatten(1, (k.shape[1], -1)), d_den.unflatten(1, (k.shape[1], -1))
        states = *_grouped_state(kv, z), *outer, *_grouped_state(d_kv, d_z)
        dq, dk, dv = total.backward(*_grouped(q, k, v), cu_seqlens, *states)
    return dq.flatten(1, 2), dk.squeeze(2), dv.squeeze(2), d_kv, d_z


@chunk_scan.register_fake
@total_sums.register_fake
def _(q, k, v, kv, z, *options):  # type: ignore[no-untyped-def]
    num = q.new_empty(*q.shape[:3], v.shape[3], dtype=kv.dtype)
    return num, q.new_empty(q.shape[:3], dtype=kv.dtype), *_like(kv, z)


@chunk_scan_backward.register_fake
def _(d_num, d_den, d_kv, d_z, q, k, v, kv, z, log_decay, *options):  # type: ignore[no-untyped-def]
    da = q.new_empty(0) if log_decay is None else torch.empty_like(log_decay, memory_format=torch.contiguous_format)
    return *_like(q, k, v, kv, z), da


@total_backward.register_fake
def _(d_num, d_den, d_kv, d_z, q, k, v, kv, z, cu_seqlens):  # type: ignore[no-untyped-def]
    return tuple(_like(q, k, v, kv, z))


def _remember_scan(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, chunk, key_index, strict = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = chunk, key_index, strict


def _scan_gradients(ctx, d_num, d_den, d_kv, d_z):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # read once: gradient checkpointing returns them only once
    *found, da = chunk_scan_backward(d_num, d_den, d_kv, d_z, *saved, *ctx.options)
    has_decay = saved[5] is not None
    return *found, da if has_decay else None, None, None, None, None


def _remember_total(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, _, _, cu_seqlens = inputs
    _, _, kv, z = output
    ctx.save_for_backward(q, k, v, kv, z, cu_seqlens)


def _total_gradients(ctx, d_num, d_den, d_kv, d_z):  # type: ignore[no-untyped-def]
    return *total_backward(d_num, d_den, d_kv, d_z, *ctx.saved_tensors), None


chunk_scan.register_autograd(_scan_gradients, setup_context=_remember_scan)
total_sums.register_autograd(_total_gradients, setup_context=_remember_total)
refuse_second_derivatives(chunk_scan_backward, "the chunked form")
refuse_second_derivatives(total_backward, "the chunked form")


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Group query heads by the key head they share: (B, H_kv, G, T, .) and (B, H_kv, 1, T, .)."""
    return q.unflatten(1, (k.shape[1], -1)), k.unsqueeze(2), v.unsqueeze(2)


def _grouped_state(kv: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return kv.unsqueeze(2), z[:, :, None, :, None]


def _rows(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Batch and key heads as rows: q (R, G, T, K), k (R, T, K), v (R, T, V), log_decay (R, T or 1, ..)."""
    q, k, v = (
        q.reshape(k.shape[0] * k.shape[1], q.shape[1] // k.shape[1], *q.shape[2:]),
        k.flatten(0, 1),
        v.flatten(0, 1),
    )
    if log_decay is not None:
        log_decay = (
            log_decay.repeat(k.shape[0] // log_decay.shape[0])[:, None]
            if log_decay.ndim == 1
            else log_decay.flatten(0, 1)
        )
    return q, k, v, log_decay


def _state_rows(kv: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """One row per sequence and key head; views, so that updates reach the originals."""
    return kv.flatten(0, 1), z.flatten(0, 1).unsqueeze(-1)


def _copies(*tensors: Tensor) -> list[Tensor]:
    return [x.clone(memory_format=torch.contiguous_format) for x in tensors]


def _like(*tensors: Tensor) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


def _exact(like: Tensor) -> torch.autocast:
    """Turn autocast off: it acts inside operators too, and would round states and sums."""
    device = like.device.type
    return torch.autocast(device if device in ("cpu", "cuda", "xpu", "mps") else "cpu", enabled=False)
