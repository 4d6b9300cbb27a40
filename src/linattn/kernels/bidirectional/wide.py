"""Backward launches of bidirectional attention for heads whose state does not fit one program."""

import torch
from torch import Tensor

from linattn.kernels.bidirectional.config import Config, Inputs, Widths, columns_for, segments_for
from linattn.kernels.bidirectional.long import gather
from linattn.kernels.bidirectional.maps import arguments_of
from linattn.kernels.bidirectional.short import mask_of
from linattn.kernels.common.launching import launch
from linattn.kernels.common.layout import is_token_major
from linattn.kernels.common.support import padded


def backward_wide(
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
    gather(x, w, x.q, d_output, scale, delta, None, d_state, x.norm != 0, arguments_of(x)[0], total, config)
    _apply(x, x.v, total, by_column, K * V, None, None, x.key_mask, dk, config)
    _apply(x, x.k, total, by_row, None, None, None, x.key_mask, dv, config)


def _stats(x: Inputs, d_output: Tensor, state: Tensor, scale: Tensor, delta: Tensor, config: Config) -> None:
    from linattn.kernels.bidirectional.device.stats import bidirectional_stats as kernel

    (N, H_kv, _), (_, H, T, K), V = state.shape, x.q.shape, x.v.shape[3]
    if scale.numel() == 0:
        return
    segments = segments_for(N * H_kv, T * (H // H_kv), config, x.q.device)
    launch(
        kernel, N * H_kv * segments,
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
    from linattn.kernels.bidirectional.device.apply import bidirectional_apply as kernel

    (N, H_kv, size), (_, H, T, D), C = state.shape, rows.shape, out.shape[3]
    if out.numel() == 0:
        return
    BD = padded(D)
    BN = min(padded(C), columns_for(x.q, BD))
    tiles = -(-C // BN)
    segments = segments_for(N * H_kv * tiles, T * (H // H_kv), config, x.q.device)
    mask, mask_strides = mask_of(key_mask, rows)
    launch(
        kernel, N * H_kv * segments * tiles,
        rows, state, state if scale is None else scale, state if delta is None else delta, mask,
        state if x.cu_seqlens is None else x.cu_seqlens, out,
        *rows.stride(), *mask_strides, H_kv, H // H_kv, T, segments,
        STATE=size, M_d=strides[0], M_n=strides[1], r_at=added or 0,
        WEIGHTED=scale is not None, ADD=added is not None and scale is None, HAS_MASK=key_mask is not None,
        PACKED=x.cu_seqlens is not None, SPLIT=config.split, BY_TOKEN=is_token_major(out),
        BF16=x.q.dtype == torch.bfloat16, IEEE=x.q.dtype == torch.float32,
        D=D, C=C, BD=BD, BN=BN, **config.options(),
    )  # fmt: skip
