"""Linear attention chunk by chunk: linear time and memory, exact, in plain PyTorch. The default on a CPU.

The causal pass is an operator of torch's library with a gradient formula of its own: one node for autograd and
torch.compile, whatever the length.
"""

import torch
from torch import Tensor

from linattn.ops.linear.chunked import scan
from linattn.ops.linear.chunked.scan import Scan
from linattn.ops.shared.call import refuse_second_derivatives, without_autocast
from linattn.ops.shared.packing import both_ways, one_by_one
from linattn.ops.shared.types import LinearState, Pattern, Sums


def linear_sums(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, initial: LinearState) -> Sums:
    if pattern.causal:
        return sweep(q, k, v, pattern, initial)
    if pattern.log_decay is not None:
        return both_ways(sweep, q, k, v, pattern, initial)
    return total_sums(q, k, v, pattern, initial)


def sweep(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, initial: LinearState, strict: bool = False) -> Sums:
    """One causal pass; in a strict one no token sees itself."""
    key_index = pattern.decay_index == "key"
    chunk = _chunk_size(k, v, pattern)
    num, den, kv, z = chunk_scan(
        q, k, v, initial.kv, initial.k, pattern.log_decay, pattern.cu_seqlens, chunk, key_index, strict
    )
    return Sums(num, den, LinearState(kv, z))


@one_by_one
def total_sums(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, initial: LinearState) -> Sums:
    """Sums without a decay, in which each query reads all keys; queries and keys may differ in number."""
    q, k, v = (x.unflatten(1, (k.shape[1], -1)) for x in (q, k, v))  # (B, H_kv, G, T, .), G = 1 for keys
    num, den, kv, z = _Total.apply(q, k, v, initial.kv, initial.k)
    return Sums(num.flatten(1, 2), den.flatten(1, 2), LinearState(kv, z))


class _Total(torch.autograd.Function):
    """The sums of heads grouped by the key head they share; the gradients are products like them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        kv, z = kv + (k.mT @ v).squeeze(2), z + k.sum(-2).squeeze(2)
        return q @ kv.unsqueeze(2), (q @ z[:, :, None, :, None]).squeeze(-1), kv, z

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs[:3], *output[2:])

    @staticmethod
    def backward(ctx, d_num, d_den, d_kv, d_z):  # type: ignore[no-untyped-def]
        q, k, v, kv, z = ctx.saved_tensors
        kv, z, d_sum = kv.unsqueeze(2), z[:, :, None, :, None], d_den.unsqueeze(-1)
        d_kv = d_kv.unsqueeze(2) + (q.mT @ d_num).sum(2, keepdim=True)
        d_z = d_z[:, :, None, :, None] + (q.mT @ d_sum).sum(2, keepdim=True)
        dq, dk, dv = d_num @ kv.mT + d_sum * z.mT, v @ d_kv.mT + d_z.mT, k @ d_kv
        return dq, dk, dv, d_kv.squeeze(2), d_z[:, :, 0, :, 0]


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


@chunk_scan.register_fake
def _(q, k, v, kv, z, *options):  # type: ignore[no-untyped-def]
    num = q.new_empty(*q.shape[:3], v.shape[3], dtype=kv.dtype)
    return num, q.new_empty(q.shape[:3], dtype=kv.dtype), *_like(kv, z)


@chunk_scan_backward.register_fake
def _(d_num, d_den, d_kv, d_z, q, k, v, kv, z, log_decay, *options):  # type: ignore[no-untyped-def]
    da = q.new_empty(0) if log_decay is None else torch.empty_like(log_decay, memory_format=torch.contiguous_format)
    return *_like(q, k, v, kv, z), da


def _remember_scan(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, chunk, key_index, strict = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = chunk, key_index, strict


def _scan_gradients(ctx, d_num, d_den, d_kv, d_z):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # read once: gradient checkpointing returns them only once
    *gradients, da = chunk_scan_backward(d_num, d_den, d_kv, d_z, *saved, *ctx.options)
    return *gradients, None if saved[5] is None else da, None, None, None, None


chunk_scan.register_autograd(_scan_gradients, setup_context=_remember_scan)
refuse_second_derivatives(chunk_scan_backward, "the chunked form")


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
