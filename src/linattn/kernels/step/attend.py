"""The decoding step: output and next state of one token, in one kernel.

The state is almost all the memory traffic: it is read once and written once, however many query heads share it.
The backward pass is a formula in plain PyTorch, since training through single steps need not be fast.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.kernels.common.direct import is_traced
from linattn.kernels.common.launching import launch as launch_kernel
from linattn.kernels.common.support import NORM_CODES, padded
from linattn.ops.shared.types import AttentionOutput, DecayIndex, LinearState, Normalizer


class StepTiles(NamedTuple):
    """Value columns of a tile, tiles of a program, warps."""

    columns: int
    tiles: int
    warps: int


def attend_step(
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    state: LinearState | None,
    *,
    log_decay: Tensor | None,
    decay_index: DecayIndex = "query",
    normalizer: Normalizer,
    eps: float,
    out_dtype: torch.dtype,
) -> AttentionOutput:
    """One decoding step: the output ``(B, H, V)`` and a new state.

    ``q_t (B, H, K)``, ``k_t (B, H_kv, K)``, ``v_t (B, H_kv, V)``; ``log_decay`` None, ``(H_kv,)``, ``(B, H_kv)`` or
    ``(B, H_kv, K)``. A state of None is empty.
    """
    kv, z = (None, None) if state is None else (state.kv.float(), state.k.float())
    key_index = decay_index == "key"
    inputs = q_t, k_t, v_t, kv, z, log_decay, key_index, normalizer, eps, out_dtype
    # Past the dispatcher, which takes longer than the kernel.
    run = step if torch.is_grad_enabled() or is_traced(inputs) else _forward
    output, kv, z = run(*inputs)
    return AttentionOutput(output, LinearState(kv, z))


def attend_step_(
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    state: LinearState,
    *,
    log_decay: Tensor | None,
    decay_index: DecayIndex = "query",
    normalizer: Normalizer,
    eps: float,
    out_dtype: torch.dtype,
) -> AttentionOutput:
    """:func:`attend_step` that overwrites ``state``, for decoding loops and CUDA graphs. It has no gradient."""
    kv, z = state
    for name, x in (("state.kv", kv), ("state.k", z)):
        if x.dtype != torch.float32:
            raise TypeError(f"{name} must be float32 to be overwritten, got {x.dtype}")
    tensors = [q_t, k_t, v_t, kv, z] + ([] if log_decay is None else [log_decay])
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError("a step in place has no gradient: call it under torch.no_grad(), or use attend_step")
    key_index = decay_index == "key"
    output = step_in_place(q_t, k_t, v_t, kv, z, log_decay, key_index, normalizer, eps, out_dtype)
    return AttentionOutput(output, state)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None, z: Tensor | None, log_decay: Tensor | None,
    key_index: bool, normalizer: str | None, eps: float, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output and next state."""
    B, H_kv, K = k.shape
    output = torch.empty(*q.shape[:2], v.shape[2], dtype=out_dtype, device=q.device)
    next_kv = torch.empty(B, H_kv, K, v.shape[2], dtype=torch.float32, device=q.device)
    next_z = torch.empty(B, H_kv, K, dtype=torch.float32, device=q.device)
    launch(q, k, v, kv, z, log_decay, key_index, normalizer, eps, output, next_kv, next_z)
    return output, next_kv, next_z


step = torch.library.custom_op("linattn::triton_step", _forward, mutates_args=())


@torch.library.custom_op("linattn::triton_step_", mutates_args=("kv", "z"))
def step_in_place(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor, log_decay: Tensor | None,
    key_index: bool, normalizer: str | None, eps: float, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Output; the state is overwritten by the next one."""
    output = torch.empty(*q.shape[:2], v.shape[2], dtype=out_dtype, device=q.device)
    launch(q, k, v, kv, z, log_decay, key_index, normalizer, eps, output, kv, z)
    return output


@step.register_fake
def _(q, k, v, kv, z, log_decay, key_index, normalizer, eps, out_dtype):  # type: ignore[no-untyped-def]
    output = q.new_empty(*q.shape[:2], v.shape[2], dtype=out_dtype)
    next_kv = k.new_empty(*k.shape, v.shape[2], dtype=torch.float32)
    return output, next_kv, k.new_empty(k.shape, dtype=torch.float32)


@step_in_place.register_fake
def _(q, k, v, kv, z, log_decay, key_index, normalizer, eps, out_dtype):  # type: ignore[no-untyped-def]
    return q.new_empty(*q.shape[:2], v.shape[2], dtype=out_dtype)


def tiles_for(K: int, V: int, one_program: bool) -> StepTiles:
    """Tiles of about 4096 numbers of the state, 32 for each thread; rows of at least 128 bytes if V is that wide."""
    columns = min(max(32, 4096 // padded(K)), padded(V))
    return StepTiles(columns, -(-V // columns) if one_program else 1, 4)


def launch(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None, z: Tensor | None, log_decay: Tensor | None,
    key_index: bool, normalizer: str | None, eps: float,
    output: Tensor, next_kv: Tensor, next_z: Tensor, tiles: StepTiles | None = None,
) -> None:  # fmt: skip
    from linattn.kernels.step.device.step import step as kernel

    (B, H_kv, K), V = k.shape, v.shape[2]
    in_place = kv is next_kv
    # The programs of a head read the same sum of keys; in place one of them would overwrite it before others read it.
    tiles = tiles or tiles_for(K, V, one_program=in_place and normalizer is not None)
    programs = max(1, -(-V // (tiles.columns * tiles.tiles)))  # the sum of keys moves on even if V = 0
    if log_decay is not None and log_decay.dtype == torch.float64:
        log_decay = log_decay.float()
    if next_z.numel() == 0:
        output.zero_()  # there are no keys, but there may be queries
        return
    launch_kernel(
        kernel, B * H_kv * programs,
        q, k, v, k if log_decay is None else log_decay, next_kv if kv is None else kv, next_z if z is None else z,
        output, next_kv, next_z,
        eps, H_kv, q.shape[1] // H_kv,
        *q.stride(), *k.stride(), *v.stride(), *_decay_strides(log_decay),
        *(next_kv if kv is None else kv).stride(), *(next_z if z is None else z).stride(),
        K=K, V=V, NORM=NORM_CODES[normalizer],
        HAS_STATE=kv is not None, HAS_DECAY=log_decay is not None,
        CHANNELS=log_decay is not None and log_decay.ndim == 3, KEY_INDEX=key_index, IN_PLACE=in_place,
        BLOCK_K=padded(K), BLOCK_V=tiles.columns, TILES=tiles.tiles, PROGRAMS=programs,
        num_warps=tiles.warps,
    )  # fmt: skip


def _decay_strides(log_decay: Tensor | None) -> tuple[int, int, int]:
    if log_decay is None:
        return 0, 0, 0
    s = log_decay.stride()
    return (0, s[0], 0) if len(s) == 1 else (s[0], s[1], s[2] if len(s) == 3 else 0)


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.key_index, ctx.normalizer, ctx.eps, _ = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, d_out, d_kv, d_z):  # type: ignore[no-untyped-def]
    options = {"key_index": ctx.key_index, "normalizer": ctx.normalizer, "eps": ctx.eps}
    return *gradients(d_out, d_kv, d_z, *ctx.saved_tensors, **options), None, None, None, None


def gradients(
    d_out: Tensor, d_kv: Tensor, d_z: Tensor,
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None, z: Tensor | None, log_decay: Tensor | None,
    *, key_index: bool, normalizer: str | None, eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of the six tensors. With R and r the state that the query reads, o = q R / n(q r)."""
    G = q.shape[1] // k.shape[1]
    q32, k32, v32 = q.float().unflatten(1, (-1, G)), k.float(), v.float()  # (B, H_kv, G, K), (B, H_kv, K), (.., V)
    d_out = d_out.float().unflatten(1, (-1, G))
    has_state = kv is not None and z is not None
    if kv is None or z is None:
        kv, z = k32.new_zeros(*k.shape, v.shape[2]), torch.zeros_like(k32)
    lam = _lambda(log_decay, k32)
    before = torch.ones_like(lam) if key_index else lam  # what scales the state before the query reads it
    after = lam if key_index else torch.ones_like(lam)  # and what scales it afterwards
    read_kv = before.unsqueeze(-1) * kv + k32.unsqueeze(-1) * v32.unsqueeze(-2)
    read_z = before * z + k32

    d_num, d_den = _normalizer_gradients(d_out, q32, read_kv, read_z, normalizer, eps)
    d_q = d_num @ read_kv.transpose(-1, -2) + d_den * read_z.unsqueeze(2)
    d_read_kv = q32.transpose(-1, -2) @ d_num + after.unsqueeze(-1) * d_kv
    d_read_z = (q32 * d_den).sum(2) + after * d_z
    d_k = (d_read_kv @ v32.unsqueeze(-1)).squeeze(-1) + d_read_z
    d_v = (k32.unsqueeze(-2) @ d_read_kv).squeeze(-2)

    d_decay = None
    if log_decay is not None:
        by_key = (d_kv * read_kv).sum(-1) + d_z * read_z if key_index else (d_read_kv * kv).sum(-1) + d_read_z * z
        d_decay = by_key * lam
        if log_decay.ndim < 3:
            d_decay = d_decay.sum(-1)
        d_decay = (d_decay.sum(0) if log_decay.ndim == 1 else d_decay).to(log_decay.dtype)
    d_old = (before.unsqueeze(-1) * d_read_kv, before * d_read_z) if has_state else (None, None)
    d_q, d_k, d_v = d_q.flatten(1, 2).to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)
    return d_q, d_k, d_v, *d_old, d_decay


def _lambda(log_decay: Tensor | None, k: Tensor) -> Tensor:
    if log_decay is None:
        return torch.ones_like(k)
    a = log_decay.float().exp()
    return (a[:, None] if a.ndim == 1 else a if a.ndim == 3 else a.unsqueeze(-1)).expand_as(k)


def _normalizer_gradients(
    d_out: Tensor, q: Tensor, kv: Tensor, z: Tensor, normalizer: str | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the numerator ``(B, H_kv, G, V)`` and of the row sum ``(B, H_kv, G, 1)``."""
    if normalizer is None:
        return d_out, torch.zeros_like(d_out[..., :1])
    row_sum = q @ z.unsqueeze(-1)
    n = row_sum + eps if normalizer == "sum" else row_sum.abs().clamp(min=1)
    d_num = d_out / n
    d_n = -(d_num * (q @ kv)).sum(-1, keepdim=True) / n
    if normalizer == "abs_max_one":
        d_n = torch.where(row_sum.abs() >= 1, d_n * row_sum.sign(), torch.zeros_like(d_n))
    return d_num, d_n


step.register_autograd(_gradients, setup_context=_remember)
