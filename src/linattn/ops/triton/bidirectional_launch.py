"""The launches of bidirectional attention."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from linattn.ops.triton.bidirectional_config import (
    WIDE,
    Config,
    Inputs,
    columns_for,
    fits_one_program,
    long_config,
    segments_for,
    short_config,
)
from linattn.ops.triton.support import padded


def forward(x: Inputs, output: Tensor, state: Tensor, config: Config | None = None) -> None:
    with _device(x.q):
        if fits_one_program(x.q, x.k, x.v, x.cu_seqlens):
            _forward_short(x, output, state, config or short_config(x.q, x.v))
        else:
            config = config or long_config(x.q, x.v)
            _gather(x, x.k, x.v, None, None, x.key_mask, x.initial, True, state, config)
            _read(x, state, output, config)


def backward(
    x: Inputs, d_output: Tensor, d_state: Tensor | None, state: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, d_initial: Tensor, config: Config | None = None,
) -> None:  # fmt: skip
    d_state = None if d_state is None else d_state.contiguous()
    with _device(x.q):
        if fits_one_program(x.q, x.k, x.v, x.cu_seqlens):
            config = config or short_config(x.q, x.v, backward=True)
            _backward_short(x, d_output, d_state, dq, dk, dv, d_initial, config)
            return
        config = config or long_config(x.q, x.v)
        total = d_initial if x.initial is not None else torch.empty_like(state)
        if padded(x.q.shape[3]) * padded(x.v.shape[3]) <= WIDE // (16 if x.q.dtype == torch.float32 else 1):
            _query_grad(x, d_output, d_state, state, dq, total, config)
            _key_grad(x, total, dk, dv, config)
        else:
            _backward_wide(x, d_output, d_state, state, dq, dk, dv, total, config)


def _forward_short(x: Inputs, output: Tensor, state: Tensor, config: Config) -> None:
    from linattn.ops.triton.kernels.bidirectional_forward import bidirectional_forward as kernel

    (B, H_kv, Tk, K), H, Tq, V = x.k.shape, x.q.shape[1], x.q.shape[2], x.v.shape[3]
    if B * H_kv == 0:
        return
    mask, mask_strides = _mask(x.key_mask, x.k)
    kernel[(B * H_kv,)](
        x.q, x.k, x.v, output, mask, x.initial if x.initial is not None else state, state,
        *x.q.stride(), *x.k.stride(), *x.v.stride(), *mask_strides,
        H_kv, H // H_kv, Tq, Tk, x.eps,
        NORM=x.norm, HAS_MASK=x.key_mask is not None, HAS_INITIAL=x.initial is not None,
        STORE_STATE=state.numel() > 0, SPLIT=config.split, K=K, V=V, BK=padded(K), BV=padded(V), **config.options(),
    )  # fmt: skip


def _backward_short(
    x: Inputs, d_output: Tensor, d_state: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor, d_initial: Tensor, config: Config,
) -> None:  # fmt: skip
    from linattn.ops.triton.kernels.bidirectional_backward import bidirectional_backward as kernel

    (B, H_kv, Tk, K), H, Tq, V = x.k.shape, x.q.shape[1], x.q.shape[2], x.v.shape[3]
    if B * H_kv == 0:
        return
    mask, mask_strides = _mask(x.key_mask, x.k)
    kernel[(B * H_kv,)](
        x.q, x.k, x.v, d_output, mask, x.initial if x.initial is not None else d_initial,
        d_state if d_state is not None else d_initial, dq, dk, dv, d_initial,
        *x.q.stride(), *x.k.stride(), *x.v.stride(), *d_output.stride(), *mask_strides,
        H_kv, H // H_kv, Tq, Tk, x.eps,
        NORM=x.norm, HAS_MASK=x.key_mask is not None, HAS_INITIAL=x.initial is not None,
        HAS_D_STATE=d_state is not None, SPLIT=config.split, K=K, V=V, BK=padded(K), BV=padded(V), **config.options(),
    )  # fmt: skip


def _gather(
    x: Inputs, rows: Tensor, columns: Tensor, scale: Tensor | None, delta: Tensor | None, key_mask: Tensor | None,
    initial: Tensor | None, keys: bool, total: Tensor, config: Config,
) -> None:  # fmt: skip
    """total = initial + sum of rows^T columns over tokens (and heads of a group)."""
    from linattn.ops.triton.kernels.bidirectional_gather import bidirectional_gather as kernel

    (N, H_kv, _), (_, H, T, K), V = total.shape, rows.shape, columns.shape[3]
    if total.numel() == 0:
        return
    side = 64 if rows.dtype == torch.float32 else 128
    BK, BV = min(padded(K), side), min(padded(V), side)
    tiles = -(-K // BK) * -(-max(V, 1) // BV)
    segments = segments_for(N * H_kv * tiles, T * (H // H_kv), config.BT, rows.device)
    partial = total.unsqueeze(0) if segments == 1 and initial is None else total.new_empty(segments, *total.shape)
    mask, mask_strides = _mask(key_mask, rows)
    kernel[(N * H_kv * segments * tiles,)](
        rows, columns, total if scale is None else scale, total if delta is None else delta, mask,
        total if x.cu_seqlens is None else x.cu_seqlens, partial,
        *rows.stride(), *columns.stride(), *mask_strides, N, H_kv, H // H_kv, T, segments,
        WEIGHTED=scale is not None, KEYS=keys, HAS_MASK=key_mask is not None,
        PACKED=x.cu_seqlens is not None, K=K, V=V, BK=BK, BV=BV, **config.options(),
    )  # fmt: skip
    _sum(partial, initial, total)


def _sum(partial: Tensor, initial: Tensor | None, total: Tensor) -> None:
    from linattn.ops.triton.kernels.bidirectional_sum import bidirectional_sum as kernel

    if partial.data_ptr() == total.data_ptr():
        return
    size, block = total.numel(), 256
    kernel[(-(-size // block),)](
        partial, total if initial is None else initial, total, size, partial.shape[0],
        HAS_INITIAL=initial is not None, BLOCK=block, num_warps=2,
    )  # fmt: skip


def _read(x: Inputs, state: Tensor, output: Tensor, config: Config) -> None:
    from linattn.ops.triton.kernels.bidirectional_read import bidirectional_read as kernel

    (N, H_kv, _), (_, H, T, K), V = state.shape, x.q.shape, x.v.shape[3]
    if output.numel() == 0 or state.numel() == 0:
        return
    BK = padded(K)
    BV = min(padded(V), columns_for(x.q, BK))
    tiles = -(-V // BV)
    segments = segments_for(N * H_kv * tiles, T * (H // H_kv), config.BT, x.q.device)
    kernel[(N * H_kv * segments * tiles,)](
        x.q, state, output, state if x.cu_seqlens is None else x.cu_seqlens, *x.q.stride(),
        H_kv, H // H_kv, T, segments, x.eps, NORM=x.norm, PACKED=x.cu_seqlens is not None, SPLIT=config.split,
        K=K, V=V, BK=BK, BV=BV, **config.options(),
    )  # fmt: skip


def _query_grad(
    x: Inputs, d_output: Tensor, d_state: Tensor | None, state: Tensor, dq: Tensor, total: Tensor, config: Config
) -> None:
    from linattn.ops.triton.kernels.bidirectional_query_grad import bidirectional_query_grad as kernel

    (N, H_kv, _), (_, H, T, K), V = state.shape, x.q.shape, x.v.shape[3]
    if state.numel() == 0:
        return
    segments = segments_for(N * H_kv, T * (H // H_kv), config.BT, x.q.device)
    partial = total.unsqueeze(0) if segments == 1 and d_state is None else total.new_empty(segments, *total.shape)
    kernel[(N * H_kv * segments,)](
        x.q, d_output, state, state if x.cu_seqlens is None else x.cu_seqlens, dq, partial,
        *x.q.stride(), *d_output.stride(), N, H_kv, H // H_kv, T, segments, x.eps,
        NORM=x.norm, PACKED=x.cu_seqlens is not None, SPLIT=config.split,
        K=K, V=V, BK=padded(K), BV=padded(V), **config.options(),
    )  # fmt: skip
    _sum(partial, d_state, total)


def _key_grad(x: Inputs, d_state: Tensor, dk: Tensor, dv: Tensor, config: Config) -> None:
    from linattn.ops.triton.kernels.bidirectional_key_grad import bidirectional_key_grad as kernel

    (N, H_kv, _), (_, _, T, K), V = d_state.shape, x.k.shape, x.v.shape[3]
    if dk.numel() == 0:
        return
    mask, mask_strides = _mask(x.key_mask, x.k)
    segments = segments_for(N * H_kv, T, config.BT, x.q.device)
    kernel[(N * H_kv * segments,)](
        x.k, x.v, d_state, mask, d_state if x.cu_seqlens is None else x.cu_seqlens, dk, dv,
        *x.k.stride(), *x.v.stride(), *mask_strides, H_kv, T, segments,
        HAS_MASK=x.key_mask is not None, PACKED=x.cu_seqlens is not None, SPLIT=config.split,
        K=K, V=V, BK=padded(K), BV=padded(V), **config.options(),
    )  # fmt: skip


def _backward_wide(
    x: Inputs, d_output: Tensor, d_state: Tensor | None, state: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, total: Tensor, config: Config,
) -> None:  # fmt: skip
    """Heads whose state does not fit one program: each product is a pass of its own."""
    K, V = x.q.shape[3], x.v.shape[3]
    scale = delta = None
    if x.norm:
        scale, delta = (x.q.new_empty(x.q.shape[:3], dtype=torch.float32) for _ in range(2))
        _stats(x, d_output, state, scale, delta, config)
    by_row, by_column = (V, 1), (1, V)
    _apply(x, d_output, state, by_column, K * V if x.norm else None, scale, delta, None, dq, config)
    _gather(x, x.q, d_output, scale, delta, None, d_state, x.norm != 0, total, config)
    _apply(x, x.v, total, by_column, K * V, None, None, x.key_mask, dk, config)
    _apply(x, x.k, total, by_row, None, None, None, x.key_mask, dv, config)


def _stats(x: Inputs, d_output: Tensor, state: Tensor, scale: Tensor, delta: Tensor, config: Config) -> None:
    from linattn.ops.triton.kernels.bidirectional_stats import bidirectional_stats as kernel

    (N, H_kv, _), (_, H, T, K), V = state.shape, x.q.shape, x.v.shape[3]
    if scale.numel() == 0:
        return
    segments = segments_for(N * H_kv, T * (H // H_kv), config.BT, x.q.device)
    kernel[(N * H_kv * segments,)](
        x.q, d_output, state, state if x.cu_seqlens is None else x.cu_seqlens, scale, delta,
        *x.q.stride(), *d_output.stride(), H_kv, H // H_kv, T, segments, x.eps,
        NORM=x.norm, PACKED=x.cu_seqlens is not None, SPLIT=config.split,
        K=K, V=V, BK=padded(K), BV=min(padded(V), columns_for(x.q, padded(K))), **config.options(),
    )  # fmt: skip


def _apply(
    x: Inputs, rows: Tensor, state: Tensor, strides: tuple[int, int], added: int | None,
    scale: Tensor | None, delta: Tensor | None, key_mask: Tensor | None, out: Tensor, config: Config,
) -> None:  # fmt: skip
    """out = rows M, weighted per token, plus a row of the state: see the kernel."""
    from linattn.ops.triton.kernels.bidirectional_apply import bidirectional_apply as kernel

    (N, H_kv, size), (_, H, T, D), C = state.shape, rows.shape, out.shape[3]
    if out.numel() == 0:
        return
    BD = padded(D)
    BN = min(padded(C), columns_for(x.q, BD))
    tiles = -(-C // BN)
    segments = segments_for(N * H_kv * tiles, T * (H // H_kv), config.BT, x.q.device)
    mask, mask_strides = _mask(key_mask, rows)
    kernel[(N * H_kv * segments * tiles,)](
        rows, state, state if scale is None else scale, state if delta is None else delta, mask,
        state if x.cu_seqlens is None else x.cu_seqlens, out,
        *rows.stride(), *mask_strides, H_kv, H // H_kv, T, segments,
        STATE=size, M_d=strides[0], M_n=strides[1], r_at=added or 0,
        WEIGHTED=scale is not None, ADD=added is not None and scale is None, HAS_MASK=key_mask is not None,
        PACKED=x.cu_seqlens is not None, SPLIT=config.split,
        BF16=x.q.dtype == torch.bfloat16, IEEE=x.q.dtype == torch.float32,
        D=D, C=C, BD=BD, BN=BN, **config.options(),
    )  # fmt: skip


def _mask(key_mask: Tensor | None, other: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """The mask as bytes; where there is none, any pointer, which is not read."""
    if key_mask is None:
        return other, (0, 0)
    stride = key_mask.stride()
    return key_mask.view(torch.uint8), (stride[0], stride[1])


def _device(like: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(like.device) if like.is_cuda else nullcontext()
