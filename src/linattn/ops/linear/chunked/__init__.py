"""Linear attention chunk by chunk: linear time and memory, exact, in plain PyTorch. The default on a CPU.

The causal pass and the bidirectional sum are operators of torch's library with gradient formulas of their own: one node
for autograd and torch.compile, whatever the length.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from linattn.ops.linear.chunked import scan
from linattn.ops.linear.chunked.scan import Scan
from linattn.ops.shared.call import refuse_second_derivatives, without_autocast
from linattn.ops.shared.packing import both_ways
from linattn.ops.shared.types import LinearState, Pattern, Sums


def linear_sums(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, initial: LinearState) -> Sums:
    if pattern.causal:
        return sweep(q, k, v, pattern, initial)
    if pattern.log_decay is not None:
        return both_ways(sweep, q, k, v, pattern, initial)
    num, den, kv, z = total_sums(q, k, v, initial.kv, initial.k, pattern.cu_seqlens)
    return Sums(num, den, LinearState(kv, z))


def sweep(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, initial: LinearState, strict: bool = False) -> Sums:
    """One causal pass; in a strict one no token sees itself."""
    key_index = pattern.decay_index == "key"
    chunk = _chunk_size(k, v, pattern)
    num, den, kv, z = chunk_scan(
        q, k, v, initial.kv, initial.k, pattern.log_decay, pattern.cu_seqlens, chunk, key_index, strict
    )
    return Sums(num, den, LinearState(kv, z))


def _chunk_size(k: Tensor, v: Tensor, pattern: Pattern) -> int:
    """Tokens of a chunk, by measurements on CPUs: longer ones compute more hidden pairs, shorter ones more states."""
    per_channel = pattern.log_decay is not None and pattern.log_decay.ndim == 4
    return 32 if per_channel or max(k.shape[3], v.shape[3]) <= 32 else 64


@torch.library.custom_op("linattn::chunk_scan", mutates_args=())
def chunk_scan(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, log_decay: Tensor | None, cu_seqlens: Tensor | None,
    chunk: int, key_index: bool, strict: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Causal sums from the state ``kv (N, H_kv, K, V), z (N, H_kv, K)``: numerator, denominator, next state."""
    kv, z = _copies(kv, z)
    with without_autocast(q):
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
    with without_autocast(q):
        inputs = Scan(*_rows(q, k, v, log_decay), cu_seqlens, chunk, key_index, strict, kv.dtype)
        d_num, d_den = d_num.reshape(*inputs.q.shape[:3], v.shape[3]), d_den.reshape(*inputs.q.shape[:3], 1)
        dq, dk, dv, da = scan.backward(inputs, *_state_rows(kv, z), d_num, d_den, *_state_rows(d_kv, d_z))
    if log_decay is None or da is None:
        da = q.new_empty(0)
    else:
        da = da.view(-1, log_decay.shape[0]).sum(0) if log_decay.ndim == 1 else da.view(log_decay.shape)
        da = da.to(log_decay.dtype)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape), d_kv, d_z, da


@torch.library.custom_op("linattn::total", mutates_args=())
def total_sums(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums without a decay in which each query reads all keys: numerator, denominator and the state with these added.

    Queries and keys may differ in number.
    """
    kv, z = _copies(kv, z)
    num = torch.empty(*q.shape[:3], v.shape[3], dtype=kv.dtype, device=q.device)
    den = torch.empty(q.shape[:3], dtype=kv.dtype, device=q.device)
    q, k, v, numerator, denominator = _grouped(k.shape[1], q, k, v, num, den)
    with without_autocast(q):
        for rows, span in _sequences(cu_seqlens):
            q_n, k_n, v_n = (x[:, :, :, span].to(kv.dtype) for x in (q, k, v))
            kv[rows] += (k_n.mT @ v_n).squeeze(2)
            z[rows] += k_n.sum(-2).squeeze(2)
            numerator[:, :, :, span] = q_n @ kv[rows].unsqueeze(2)
            denominator[:, :, :, span] = (q_n @ z[rows][:, :, None, :, None]).squeeze(-1)
    return num, den, kv, z


@torch.library.custom_op("linattn::total_backward", mutates_args=())
def total_backward(
    d_num: Tensor, d_den: Tensor, d_kv: Tensor, d_z: Tensor,
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and the initial state, given the final state ``kv, z``."""
    (d_kv, d_z), gradients = _copies(d_kv, d_z), _like(q, k, v)
    kv, z, d_kv_in, d_z_in = kv.unsqueeze(2), z[:, :, None, :, None], d_kv.unsqueeze(2), d_z[:, :, None, :, None]
    q, k, v, d_num, d_den, dq, dk, dv = _grouped(k.shape[1], q, k, v, d_num, d_den, *gradients)
    with without_autocast(q):
        for rows, span in _sequences(cu_seqlens):
            q_n, k_n, v_n, d_out, d_sum = (x[:, :, :, span].to(kv.dtype) for x in (q, k, v, d_num, d_den))
            d_sum = d_sum.unsqueeze(-1)
            d_kv_in[rows] += (q_n.mT @ d_out).sum(2, keepdim=True)
            d_z_in[rows] += (q_n.mT @ d_sum).sum(2, keepdim=True)
            dq[:, :, :, span] = d_out @ kv[rows].mT + d_sum * z[rows].mT
            dk[:, :, :, span] = v_n @ d_kv_in[rows].mT + d_z_in[rows].mT
            dv[:, :, :, span] = k_n @ d_kv_in[rows]
    return *gradients, d_kv, d_z  # type: ignore[return-value]


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
    *gradients, da = chunk_scan_backward(d_num, d_den, d_kv, d_z, *saved, *ctx.options)
    return *gradients, None if saved[5] is None else da, None, None, None, None


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


def _sequences(cu_seqlens: Tensor | None) -> Iterator[tuple[slice, slice]]:
    """For each sequence the slices of its rows of the state and of its tokens."""
    if cu_seqlens is None:
        yield slice(None), slice(None)
        return
    for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        yield slice(n, n + 1), slice(start, end)


def _grouped(kv_heads: int, *tensors: Tensor) -> list[Tensor]:
    """Heads grouped by the key head they share: views ``(B, H_kv, G, T, ..)`` of ``(B, H, T, ..)``; G = 1 for keys."""
    return [x.unflatten(1, (kv_heads, -1)) for x in tensors]


def _rows(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Batch and key heads as rows: q (R, G, T, K), k (R, T, K), v (R, T, V), log_decay (R, T or 1, ..)."""
    B, H_kv = k.shape[:2]
    if log_decay is not None:
        log_decay = log_decay.repeat(B)[:, None] if log_decay.ndim == 1 else log_decay.flatten(0, 1)
    return q.reshape(B * H_kv, q.shape[1] // H_kv, *q.shape[2:]), k.flatten(0, 1), v.flatten(0, 1), log_decay


def _state_rows(kv: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """One row per sequence and key head; views, so that updates reach the originals."""
    return kv.flatten(0, 1), z.flatten(0, 1).unsqueeze(-1)


def _copies(*tensors: Tensor) -> list[Tensor]:
    return [x.clone(memory_format=torch.contiguous_format) for x in tensors]


def _like(*tensors: Tensor) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
