"""The launches of bidirectional attention."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from linattn.ops.triton.bidirectional_config import (
    Config,
    Inputs,
    Widths,
    columns_for,
    fits_one_program,
    fits_programs,
    long_config,
    segments_for,
    short_config,
)
from linattn.ops.triton.bidirectional_maps import Arguments, Grads, arguments, arguments_of, new_grads, summed
from linattn.ops.triton.support import padded


def forward(x: Inputs, output: Tensor, state: Tensor, config: Config | None = None) -> None:
    w = x.widths
    with _device(x.q):
        if fits_one_program(x):
            _forward_short(x, w, output, state, config or short_config(x))
            return
        assert x.maps is None or fits_programs(x), "no kernel runs these maps itself: see can_fuse"
        of_query, of_key = arguments_of(x)
        gather, read = config or long_config(x, "gather"), config or long_config(x, "read")
        _gather(x, w, x.k, x.v, None, None, x.key_mask, x.initial, True, of_key, state, gather)
        _read(x, w, state, of_query, output, read)


def backward(
    x: Inputs, d_output: Tensor, d_state: Tensor | None, state: Tensor, d_initial: Tensor,
    learn: tuple[bool, bool] = (False, False), config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor, Grads, Grads]:  # fmt: skip
    """Gradients of q, k and v, of what the maps of q and k learn; that of the initial state is written to its place."""
    d_state = None if d_state is None else d_state.contiguous()
    w = x.widths
    shape = () if w.flows == 1 else (w.flows,)
    dq, dk = (like.new_empty((*shape, *like.shape)) for like in (x.q, x.k))
    dv = x.v.new_empty(x.v.shape)
    query, key = (None, None) if x.maps is None else (x.maps.query, x.maps.key)
    with _device(x.q):
        if fits_one_program(x):
            config = config or short_config(x, backward=True)
            of_query, of_key = _backward_short(x, w, d_output, d_state, dq, dk, dv, d_initial, learn, config)
        else:
            total = d_initial if x.initial is not None else torch.empty_like(state)
            if fits_programs(x):
                by_query, by_key = config or long_config(x, "query_grad"), config or long_config(x, "key_grad")
                of_query = _query_grad(x, w, d_output, d_state, state, dq, total, learn[0], by_query)
                of_key = _key_grad(x, w, total, dk, dv, learn[1], by_key)
            else:
                config = config or long_config(x, "key_grad")
                _backward_wide(x, w, d_output, d_state, state, dq, dk, dv, total, config)
                of_query, of_key = (new_grads(None, 1, 1, like, 1, w, False) for like in (x.q, x.k))
        if w.flows > 1:
            dq, dk = dq[0] + dq[1], dk[0] + dk[1]
        return dq, dk, dv, summed(of_query, query), summed(of_key, key)


def _forward_short(x: Inputs, w: Widths, output: Tensor, state: Tensor, config: Config) -> None:
    from linattn.ops.triton.kernels.bidirectional_forward import bidirectional_forward as kernel

    (B, H_kv, Tk, _), H, Tq = x.k.shape, x.q.shape[1], x.q.shape[2]
    if B * H_kv == 0:
        return
    mask, mask_strides = _mask(x.key_mask, x.k)
    of_query, of_key = arguments_of(x)
    kernel[(B * H_kv * w.flows,)](
        x.q, x.k, x.v, output, mask, x.initial if x.initial is not None else state, state,
        *of_query.pointers, *of_key.pointers,
        *x.q.stride(), *x.k.stride(), *x.v.stride(), *mask_strides,
        *of_query.table_strides, *of_query.token_strides, *_of_keys(of_key),
        H_kv, H // H_kv, Tq, Tk, x.eps,
        NORM=x.norm, HAS_MASK=x.key_mask is not None, HAS_INITIAL=x.initial is not None,
        STORE_STATE=state.numel() > 0, MAP_Q=of_query.code, MAP_K=of_key.code,
        TOKEN_Q=of_query.has_token, TOKEN_K=of_key.has_token, CONSTANT=w.K - w.F, FLOWS=w.flows, PARTS=w.F // w.D,
        SPLIT=config.split, D=w.D, K=w.K, V=w.V, BK=padded(w.D), BV=padded(w.V), **config.options(),
    )  # fmt: skip


def _backward_short(
    x: Inputs, w: Widths, d_output: Tensor, d_state: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor, d_initial: Tensor, learn: tuple[bool, bool], config: Config,
) -> tuple[Grads, Grads]:  # fmt: skip
    from linattn.ops.triton.kernels.bidirectional_backward import bidirectional_backward as kernel

    (B, H_kv, Tk, _), H, Tq = x.k.shape, x.q.shape[1], x.q.shape[2]
    query, key = (None, None) if x.maps is None else (x.maps.query, x.maps.key)
    d_query = new_grads(query, 1, B, x.q, H_kv, w, learn[0])
    d_key = new_grads(key, 1, B, x.k, H_kv, w, learn[1])
    if B * H_kv == 0:
        return d_query, d_key
    mask, mask_strides = _mask(x.key_mask, x.k)
    of_query, of_key = arguments_of(x)
    kernel[(B * H_kv * w.flows,)](
        x.q, x.k, x.v, d_output, mask, x.initial if x.initial is not None else d_initial,
        d_state if d_state is not None else d_initial, dq, dk, dv, d_initial,
        *of_query.pointers, *of_key.pointers, *d_query, *d_key,
        *x.q.stride(), *x.k.stride(), *x.v.stride(), *d_output.stride(), *mask_strides,
        *of_query.table_strides, *of_query.token_strides, *_of_keys(of_key),
        B, H_kv, H // H_kv, Tq, Tk, x.eps,
        NORM=x.norm, HAS_MASK=x.key_mask is not None, HAS_INITIAL=x.initial is not None,
        HAS_D_STATE=d_state is not None, MAP_Q=of_query.code, MAP_K=of_key.code,
        TOKEN_Q=of_query.has_token, TOKEN_K=of_key.has_token, LEARN_Q=learn[0], LEARN_K=learn[1],
        CONSTANT=w.K - w.F, FLOWS=w.flows, PARTS=w.F // w.D,
        SPLIT=config.split, D=w.D, K=w.K, V=w.V, BK=padded(w.D), BV=padded(w.V), **config.options(),
    )  # fmt: skip
    return d_query, d_key


def _gather(
    x: Inputs, w: Widths, rows: Tensor, columns: Tensor, scale: Tensor | None, delta: Tensor | None,
    key_mask: Tensor | None, initial: Tensor | None, keys: bool, of_rows: Arguments, total: Tensor, config: Config,
) -> None:  # fmt: skip
    """total = initial + sum of rows^T columns over tokens (and heads of a group)."""
    from linattn.ops.triton.kernels.bidirectional_gather import bidirectional_gather as kernel

    N, H, T, H_kv = total.shape[0], rows.shape[1], rows.shape[2], x.k.shape[1]
    if total.numel() == 0:
        return
    # A map has its features in one tile.
    side = 256 if of_rows.code >= 0 else 64 if rows.dtype == torch.float32 else 128
    BK, BV = min(padded(w.D), side), min(padded(w.V), side)
    tiles = -(-w.D // BK) * -(-max(w.V, 1) // BV)
    segments = segments_for(N * H_kv * w.flows * tiles, T * (H // H_kv), config, rows.device)
    partial = total.unsqueeze(0) if segments == 1 and initial is None else total.new_empty(segments, *total.shape)
    mask, mask_strides = _mask(key_mask, rows)
    kernel[(N * H_kv * w.flows * segments * tiles,)](
        rows, columns, total if scale is None else scale, total if delta is None else delta, mask,
        total if x.cu_seqlens is None else x.cu_seqlens, partial, *of_rows.pointers,
        *rows.stride(), *columns.stride(), *mask_strides, *_of_keys(of_rows), N, H_kv, H // H_kv, T, segments,
        WEIGHTED=scale is not None, KEYS=keys, HAS_MASK=key_mask is not None, PACKED=x.cu_seqlens is not None,
        MAP=of_rows.code, TOKEN=of_rows.has_token, CONSTANT=w.K - w.F, FLOWS=w.flows, PARTS=w.F // w.D,
        D=w.D, K=w.K, V=w.V, BK=BK, BV=BV, **config.options(),
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


def _read(x: Inputs, w: Widths, state: Tensor, of_query: Arguments, output: Tensor, config: Config) -> None:
    from linattn.ops.triton.kernels.bidirectional_read import bidirectional_read as kernel

    N, H, T, H_kv = state.shape[0], x.q.shape[1], x.q.shape[2], x.k.shape[1]
    if output.numel() == 0 or state.numel() == 0:
        return
    BK = padded(w.D)
    BV = min(padded(w.V), columns_for(x.q, padded(w.F)))
    tiles = -(-w.V // BV)
    segments = segments_for(N * H_kv * w.flows * tiles, T * (H // H_kv), config, x.q.device)
    kernel[(N * H_kv * w.flows * segments * tiles,)](
        x.q, state, output, state if x.cu_seqlens is None else x.cu_seqlens, *of_query.pointers, *x.q.stride(),
        *of_query.table_strides, *of_query.token_strides, H_kv, H // H_kv, T, segments, x.eps,
        NORM=x.norm, PACKED=x.cu_seqlens is not None, MAP_Q=of_query.code, TOKEN_Q=of_query.has_token,
        CONSTANT=w.K - w.F, FLOWS=w.flows, PARTS=w.F // w.D, SPLIT=config.split,
        D=w.D, K=w.K, V=w.V, BK=BK, BV=BV, **config.options(),
    )  # fmt: skip


def _query_grad(
    x: Inputs, w: Widths, d_output: Tensor, d_state: Tensor | None, state: Tensor, dq: Tensor, total: Tensor,
    learn: bool, config: Config,
) -> Grads:  # fmt: skip
    from linattn.ops.triton.kernels.bidirectional_query_grad import bidirectional_query_grad as kernel

    N, (B, H, T, _), H_kv = state.shape[0], x.q.shape, x.k.shape[1]
    segments = segments_for(N * H_kv * w.flows, T * (H // H_kv), config, x.q.device)
    side = None if x.maps is None else x.maps.query
    grads = new_grads(side, segments, N, x.q, H_kv, w, learn)
    if state.numel() == 0:
        return grads
    of_query = arguments(side, H, H_kv, w.flows, state)
    partial = total.unsqueeze(0) if segments == 1 and d_state is None else total.new_empty(segments, *total.shape)
    kernel[(N * H_kv * w.flows * segments,)](
        x.q, d_output, state, state if x.cu_seqlens is None else x.cu_seqlens, dq, partial,
        *of_query.pointers, *grads, *x.q.stride(), *d_output.stride(),
        *of_query.table_strides, *of_query.token_strides, N, B, H_kv, H // H_kv, T, segments, x.eps,
        NORM=x.norm, PACKED=x.cu_seqlens is not None, MAP_Q=of_query.code, TOKEN_Q=of_query.has_token,
        LEARN_Q=learn, CONSTANT=w.K - w.F, FLOWS=w.flows, PARTS=w.F // w.D, SPLIT=config.split,
        D=w.D, K=w.K, V=w.V, BK=padded(w.D), BV=padded(w.V), **config.options(),
    )  # fmt: skip
    _sum(partial, d_state, total)
    return grads


def _key_grad(x: Inputs, w: Widths, d_state: Tensor, dk: Tensor, dv: Tensor, learn: bool, config: Config) -> Grads:
    from linattn.ops.triton.kernels.bidirectional_key_grad import bidirectional_key_grad as kernel

    N, (B, H_kv, T, _) = d_state.shape[0], x.k.shape
    segments = segments_for(N * H_kv * w.flows, T, config, x.q.device)
    side = None if x.maps is None else x.maps.key
    grads = new_grads(side, segments, N, x.k, H_kv, w, learn)
    if d_state.numel() == 0:
        return grads
    of_key = arguments(side, H_kv, H_kv, w.flows, d_state)
    mask, mask_strides = _mask(x.key_mask, x.k)
    kernel[(N * H_kv * w.flows * segments,)](
        x.k, x.v, d_state, mask, d_state if x.cu_seqlens is None else x.cu_seqlens, dk, dv,
        *of_key.pointers, *grads, *x.k.stride(), *x.v.stride(), *mask_strides, *_of_keys(of_key),
        N, B, H_kv, T, segments,
        HAS_MASK=x.key_mask is not None, PACKED=x.cu_seqlens is not None, MAP_K=of_key.code, TOKEN_K=of_key.has_token,
        LEARN_K=learn, CONSTANT=w.K - w.F, FLOWS=w.flows, PARTS=w.F // w.D, SPLIT=config.split,
        D=w.D, K=w.K, V=w.V, BK=padded(w.D), BV=padded(w.V), **config.options(),
    )  # fmt: skip
    return grads


def _backward_wide(
    x: Inputs, w: Widths, d_output: Tensor, d_state: Tensor | None, state: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, total: Tensor, config: Config,
) -> None:  # fmt: skip
    """Heads whose state does not fit one program: each product is a pass of its own. Features only, no maps."""
    K, V = w.K, w.V
    scale = delta = None
    if x.norm:
        scale, delta = (x.q.new_empty(x.q.shape[:3], dtype=torch.float32) for _ in range(2))
        _stats(x, d_output, state, scale, delta, config)
    by_row, by_column = (V, 1), (1, V)
    _apply(x, d_output, state, by_column, K * V if x.norm else None, scale, delta, None, dq, config)
    _gather(x, w, x.q, d_output, scale, delta, None, d_state, x.norm != 0, arguments_of(x)[0], total, config)
    _apply(x, x.v, total, by_column, K * V, None, None, x.key_mask, dk, config)
    _apply(x, x.k, total, by_row, None, None, None, x.key_mask, dv, config)


def _stats(x: Inputs, d_output: Tensor, state: Tensor, scale: Tensor, delta: Tensor, config: Config) -> None:
    from linattn.ops.triton.kernels.bidirectional_stats import bidirectional_stats as kernel

    (N, H_kv, _), (_, H, T, K), V = state.shape, x.q.shape, x.v.shape[3]
    if scale.numel() == 0:
        return
    segments = segments_for(N * H_kv, T * (H // H_kv), config, x.q.device)
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
    segments = segments_for(N * H_kv * tiles, T * (H // H_kv), config, x.q.device)
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
    # The context costs more than to see that it is not needed.
    if not like.is_cuda or like.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(like.device)


def _of_keys(side: Arguments) -> tuple[int, ...]:
    """Strides of a side that has no groups."""
    (table_b, table_h, _, table_f), (token_b, token_h, _, token_t) = side.table_strides, side.token_strides
    return table_b, table_h, table_f, token_b, token_h, token_t
