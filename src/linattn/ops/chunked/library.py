"""The chunked passes as operators of torch's library: one node for autograd and torch.compile, however long T is."""

import torch
from torch import Tensor

from linattn.ops.chunked import scan, total


@torch.library.custom_op("linattn::chunk_scan", mutates_args=())
def chunk_scan(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, log_decay: Tensor | None, cu_seqlens: Tensor | None,
    chunk: int, key_index: bool, strict: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Causal sums from the state ``kv (N, H_kv, K, V), z (N, H_kv, K)``: numerator, denominator, next state."""
    kv, z = kv.clone(), z.clone()
    with _exact(q):
        inputs = scan.Scan(*_grouped(q, k, v), log_decay, cu_seqlens, chunk, key_index, strict, kv.dtype)
        num, den = scan.forward(inputs, *_grouped_state(kv, z))
    return num.flatten(1, 2), den.flatten(1, 2), kv, z


@torch.library.custom_op("linattn::chunk_scan_backward", mutates_args=())
def chunk_scan_backward(
    d_num: Tensor, d_den: Tensor, d_kv: Tensor, d_z: Tensor,
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, log_decay: Tensor | None, cu_seqlens: Tensor | None,
    chunk: int, key_index: bool, strict: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, kv, z and log_decay (empty where there is none)."""
    kv, z, d_kv, d_z = kv.clone(), z.clone(), d_kv.clone(), d_z.clone()
    with _exact(q):
        inputs = scan.Scan(*_grouped(q, k, v), log_decay, cu_seqlens, chunk, key_index, strict, kv.dtype)
        outer = d_num.unflatten(1, (k.shape[1], -1)), d_den.unflatten(1, (k.shape[1], -1))
        found = scan.backward(inputs, *_grouped_state(kv, z), *outer, *_grouped_state(d_kv, d_z))
    da = q.new_empty(0) if log_decay is None or found.log_decay is None else found.log_decay.to(log_decay.dtype)
    return found.q.flatten(1, 2), found.k.squeeze(2), found.v.squeeze(2), d_kv, d_z, da


@torch.library.custom_op("linattn::total", mutates_args=())
def total_sums(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bidirectional sums: numerator, denominator and the state with all keys added."""
    kv, z = kv.clone(), z.clone()
    with _exact(q):
        num, den = total.forward(*_grouped(q, k, v), cu_seqlens, *_grouped_state(kv, z))
    return num.flatten(1, 2), den.flatten(1, 2), kv, z


@torch.library.custom_op("linattn::total_backward", mutates_args=())
def total_backward(
    d_num: Tensor, d_den: Tensor, d_kv: Tensor, d_z: Tensor,
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and the initial state, given the final state ``kv, z``."""
    d_kv, d_z = d_kv.clone(), d_z.clone()
    with _exact(q):
        outer = d_num.unflatten(1, (k.shape[1], -1)), d_den.unflatten(1, (k.shape[1], -1))
        states = *_grouped_state(kv, z), *outer, *_grouped_state(d_kv, d_z)
        dq, dk, dv = total.backward(*_grouped(q, k, v), cu_seqlens, *states)
    return dq.flatten(1, 2), dk.squeeze(2), dv.squeeze(2), d_kv, d_z


@chunk_scan.register_fake
@total_sums.register_fake
def _(q, k, v, kv, z, *options):  # type: ignore[no-untyped-def]
    num = q.new_empty(*q.shape[:3], v.shape[3], dtype=kv.dtype)
    return num, q.new_empty(q.shape[:3], dtype=kv.dtype), torch.empty_like(kv), torch.empty_like(z)


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
    *found, da = chunk_scan_backward(d_num, d_den, d_kv, d_z, *ctx.saved_tensors, *ctx.options)
    has_decay = ctx.saved_tensors[5] is not None
    return *found, da if has_decay else None, None, None, None, None


def _remember_total(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, _, _, cu_seqlens = inputs
    _, _, kv, z = output
    ctx.save_for_backward(q, k, v, kv, z, cu_seqlens)


def _total_gradients(ctx, d_num, d_den, d_kv, d_z):  # type: ignore[no-untyped-def]
    return *total_backward(d_num, d_den, d_kv, d_z, *ctx.saved_tensors), None


chunk_scan.register_autograd(_scan_gradients, setup_context=_remember_scan)
total_sums.register_autograd(_total_gradients, setup_context=_remember_total)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query heads beside the key head they share: (B, H_kv, G, T, .) and (B, H_kv, 1, T, .)."""
    return q.unflatten(1, (k.shape[1], -1)), k.unsqueeze(2), v.unsqueeze(2)


def _grouped_state(kv: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return kv.unsqueeze(2), z[:, :, None, :, None]


def _like(*tensors: Tensor) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


def _exact(like: Tensor) -> torch.autocast:
    """Autocast reaches into operators: its rounding has no place in states and sums."""
    device = like.device.type
    return torch.autocast(device if device in ("cpu", "cuda", "xpu", "mps") else "cpu", enabled=False)
