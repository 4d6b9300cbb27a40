"""The launches of bidirectional attention where programs share a sequence."""

import torch
from torch import Tensor

from linattn.kernels.bidirectional.config import Config, Inputs, Widths, columns_for, segments_for
from linattn.kernels.bidirectional.maps import Arguments, Grads, arguments, new_grads, strides_of_keys
from linattn.kernels.bidirectional.short import mask_of
from linattn.kernels.common.launching import launch
from linattn.kernels.common.layout import is_token_major
from linattn.kernels.common.support import padded


def gather(
    x: Inputs, w: Widths, rows: Tensor, columns: Tensor, scale: Tensor | None, delta: Tensor | None,
    key_mask: Tensor | None, initial: Tensor | None, keys: bool, of_rows: Arguments, total: Tensor, config: Config,
) -> None:  # fmt: skip
    """total = initial + sum of rows^T columns over tokens (and heads of a group)."""
    from linattn.kernels.bidirectional.device.gather import bidirectional_gather as kernel

    N, H, T, H_kv = total.shape[0], rows.shape[1], rows.shape[2], x.k.shape[1]
    if total.numel() == 0:
        return
    # The features of a map must be in one tile.
    side = 256 if of_rows.code >= 0 else 64 if rows.dtype == torch.float32 else 128
    BK, BV = min(padded(w.D), side), min(padded(w.V), side)
    tiles = -(-w.D // BK) * -(-max(w.V, 1) // BV)
    segments = segments_for(N * H_kv * w.flows * tiles, T * (H // H_kv), config, rows.device)
    partial = total.unsqueeze(0) if segments == 1 and initial is None else total.new_empty(segments, *total.shape)
    mask, mask_strides = mask_of(key_mask, rows)
    launch(
        kernel, N * H_kv * w.flows * segments * tiles,
        rows, columns, total if scale is None else scale, total if delta is None else delta, mask,
        total if x.cu_seqlens is None else x.cu_seqlens, partial, *of_rows.pointers,
        *rows.stride(), *columns.stride(), *mask_strides, *strides_of_keys(of_rows), N, H_kv, H // H_kv, T, segments,
        WEIGHTED=scale is not None, KEYS=keys, HAS_MASK=key_mask is not None, PACKED=x.cu_seqlens is not None,
        GROUPED=H // H_kv > 1,
        MAP=of_rows.code, TOKEN=of_rows.has_token, CONSTANT=w.K - w.F, FLOWS=w.flows, PARTS=w.F // w.D,
        D=w.D, K=w.K, V=w.V, BK=BK, BV=BV, **config.options(),
    )  # fmt: skip
    add_parts(partial, initial, total)


def add_parts(partial: Tensor, initial: Tensor | None, total: Tensor) -> None:
    """total = initial + the parts of all segments."""
    from linattn.kernels.bidirectional.device.sum import bidirectional_sum as kernel

    if partial.data_ptr() == total.data_ptr():
        return
    size, block = total.numel(), 256
    launch(
        kernel, -(-size // block),
        partial, total if initial is None else initial, total, size, partial.shape[0],
        HAS_INITIAL=initial is not None, BLOCK=block, num_warps=2,
    )  # fmt: skip


def read(x: Inputs, w: Widths, state: Tensor, of_query: Arguments, output: Tensor, config: Config) -> None:
    from linattn.kernels.bidirectional.device.read import bidirectional_read as kernel

    N, H, T, H_kv = state.shape[0], x.q.shape[1], x.q.shape[2], x.k.shape[1]
    if output.numel() == 0 or state.numel() == 0:
        return
    BK = padded(w.D)
    BV = min(padded(w.V), columns_for(x.q, padded(w.F)))
    tiles = -(-w.V // BV)
    segments = segments_for(N * H_kv * w.flows * tiles, T * (H // H_kv), config, x.q.device)
    launch(
        kernel, N * H_kv * w.flows * segments * tiles,
        x.q, state, output, state if x.cu_seqlens is None else x.cu_seqlens, *of_query.pointers, *x.q.stride(),
        *of_query.table_strides, *of_query.token_strides, H_kv, H // H_kv, T, segments, x.eps,
        NORM=x.norm, PACKED=x.cu_seqlens is not None, GROUPED=H // H_kv > 1,
        MAP_Q=of_query.code, TOKEN_Q=of_query.has_token,
        CONSTANT=w.K - w.F, FLOWS=w.flows, PARTS=w.F // w.D, SPLIT=config.split, BY_TOKEN=is_token_major(output),
        D=w.D, K=w.K, V=w.V, BK=BK, BV=BV, **config.options(),
    )  # fmt: skip


def query_grad(
    x: Inputs, w: Widths, d_output: Tensor, d_state: Tensor | None, state: Tensor, dq: Tensor, total: Tensor,
    learn: bool, config: Config,
) -> Grads:  # fmt: skip
    from linattn.kernels.bidirectional.device.query_grad import bidirectional_query_grad as kernel

    N, (B, H, T, _), H_kv = state.shape[0], x.q.shape, x.k.shape[1]
    segments = segments_for(N * H_kv * w.flows, T * (H // H_kv), config, x.q.device)
    side = None if x.maps is None else x.maps.query
    grads = new_grads(side, segments, N, x.q, H_kv, w, learn)
    if state.numel() == 0:
        return grads
    of_query = arguments(side, H, H_kv, w.flows, state)
    partial = total.unsqueeze(0) if segments == 1 and d_state is None else total.new_empty(segments, *total.shape)
    launch(
        kernel, N * H_kv * w.flows * segments,
        x.q, d_output, state, state if x.cu_seqlens is None else x.cu_seqlens, dq, partial,
        *of_query.pointers, *grads, *x.q.stride(), *d_output.stride(),
        *of_query.table_strides, *of_query.token_strides, N, B, H_kv, H // H_kv, T, segments, x.eps,
        NORM=x.norm, PACKED=x.cu_seqlens is not None, GROUPED=H // H_kv > 1,
        MAP_Q=of_query.code, TOKEN_Q=of_query.has_token,
        LEARN_Q=learn, CONSTANT=w.K - w.F, FLOWS=w.flows, PARTS=w.F // w.D, SPLIT=config.split,
        BY_TOKEN=is_token_major(dq),
        D=w.D, K=w.K, V=w.V, BK=padded(w.D), BV=padded(w.V), **config.options(),
    )  # fmt: skip
    add_parts(partial, d_state, total)
    return grads


def key_grad(x: Inputs, w: Widths, d_state: Tensor, dk: Tensor, dv: Tensor, learn: bool, config: Config) -> Grads:
    from linattn.kernels.bidirectional.device.key_grad import bidirectional_key_grad as kernel

    N, (B, H_kv, T, _) = d_state.shape[0], x.k.shape
    segments = segments_for(N * H_kv * w.flows, T, config, x.q.device)
    side = None if x.maps is None else x.maps.key
    grads = new_grads(side, segments, N, x.k, H_kv, w, learn)
    if d_state.numel() == 0:
        return grads
    of_key = arguments(side, H_kv, H_kv, w.flows, d_state)
    mask, mask_strides = mask_of(x.key_mask, x.k)
    launch(
        kernel, N * H_kv * w.flows * segments,
        x.k, x.v, d_state, mask, d_state if x.cu_seqlens is None else x.cu_seqlens, dk, dv,
        *of_key.pointers, *grads, *x.k.stride(), *x.v.stride(), *mask_strides, *strides_of_keys(of_key),
        N, B, H_kv, T, segments,
        HAS_MASK=x.key_mask is not None, PACKED=x.cu_seqlens is not None, MAP_K=of_key.code, TOKEN_K=of_key.has_token,
        LEARN_K=learn, CONSTANT=w.K - w.F, FLOWS=w.flows, PARTS=w.F // w.D, SPLIT=config.split,
        BY_TOKEN_K=is_token_major(dk), BY_TOKEN_V=is_token_major(dv),
        D=w.D, K=w.K, V=w.V, BK=padded(w.D), BV=padded(w.V), **config.options(),
    )  # fmt: skip
    return grads
