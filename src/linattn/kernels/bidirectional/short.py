"""Launches of bidirectional attention with one program per key head."""

import torch
from torch import Tensor

from linattn.kernels.bidirectional.config import Config, Inputs, Widths, joins_flows
from linattn.kernels.bidirectional.maps import Grads, arguments_of, new_grads, strides_of_keys
from linattn.kernels.common.launching import launch
from linattn.kernels.common.layout import is_token_major
from linattn.kernels.common.support import padded


def launch_forward(x: Inputs, w: Widths, output: Tensor, state: Tensor, config: Config) -> None:
    from linattn.kernels.bidirectional.device.forward import bidirectional_forward as kernel

    (B, H_kv, Tk, _), H, Tq = x.k.shape, x.q.shape[1], x.q.shape[2]
    if B * H_kv == 0:
        return
    mask, mask_strides = mask_of(x.key_mask, x.k)
    of_query, of_key = arguments_of(x)
    joined = joins_flows(x) and not state.numel()
    flows, V = (1, w.flows * w.V) if joined else (w.flows, w.V)
    launch(
        kernel, B * H_kv * flows,
        x.q, x.k, x.v, output, mask, x.initial if x.initial is not None else state, state,
        *of_query.pointers, *of_key.pointers,
        *x.q.stride(), *x.k.stride(), *x.v.stride(), *mask_strides,
        *of_query.table_strides, *of_query.token_strides, *strides_of_keys(of_key),
        H_kv, H // H_kv, Tq, Tk, x.eps,
        NORM=x.norm, HAS_MASK=x.key_mask is not None, HAS_INITIAL=x.initial is not None, GROUPED=H // H_kv > 1,
        STORE_STATE=state.numel() > 0, MAP_Q=of_query.code, MAP_K=of_key.code,
        TOKEN_Q=of_query.has_token, TOKEN_K=of_key.has_token, CONSTANT=w.K - w.F, FLOWS=flows, JOINED=joined,
        PARTS=w.F // w.D, SPLIT=config.split, BY_TOKEN=is_token_major(output),
        D=w.D, K=w.K, V=V, BK=padded(w.D), BV=padded(V), **config.options(),
    )  # fmt: skip


def launch_backward(
    x: Inputs, w: Widths, d_output: Tensor, d_state: Tensor | None,
    dq: Tensor, dk: Tensor, dv: Tensor, d_initial: Tensor, learn: tuple[bool, bool], config: Config,
) -> tuple[Grads, Grads]:  # fmt: skip
    from linattn.kernels.bidirectional.device.backward import bidirectional_backward as kernel

    (B, H_kv, Tk, _), H, Tq = x.k.shape, x.q.shape[1], x.q.shape[2]
    query, key = (None, None) if x.maps is None else (x.maps.query, x.maps.key)
    d_query = new_grads(query, 1, B, x.q, H_kv, w, learn[0])
    d_key = new_grads(key, 1, B, x.k, H_kv, w, learn[1])
    if B * H_kv == 0:
        return d_query, d_key
    mask, mask_strides = mask_of(x.key_mask, x.k)
    of_query, of_key = arguments_of(x)
    launch(
        kernel, B * H_kv * w.flows,
        x.q, x.k, x.v, d_output, mask, x.initial if x.initial is not None else d_initial,
        d_state if d_state is not None else d_initial, dq, dk, dv, d_initial,
        *of_query.pointers, *of_key.pointers, *d_query, *d_key,
        *x.q.stride(), *x.k.stride(), *x.v.stride(), *d_output.stride(), *mask_strides,
        *of_query.table_strides, *of_query.token_strides, *strides_of_keys(of_key),
        B, H_kv, H // H_kv, Tq, Tk, x.eps,
        NORM=x.norm, HAS_MASK=x.key_mask is not None, HAS_INITIAL=x.initial is not None, GROUPED=H // H_kv > 1,
        HAS_D_STATE=d_state is not None, MAP_Q=of_query.code, MAP_K=of_key.code,
        TOKEN_Q=of_query.has_token, TOKEN_K=of_key.has_token, LEARN_Q=learn[0], LEARN_K=learn[1],
        CONSTANT=w.K - w.F, FLOWS=w.flows, PARTS=w.F // w.D,
        SPLIT=config.split, BY_TOKEN_Q=is_token_major(dq), BY_TOKEN_K=is_token_major(dk), BY_TOKEN_V=is_token_major(dv),
        D=w.D, K=w.K, V=w.V, BK=padded(w.D), BV=padded(w.V), **config.options(),
    )  # fmt: skip
    return d_query, d_key


def mask_of(key_mask: Tensor | None, other: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """The mask as bytes and its strides; without a mask, any tensor, whose pointer is not read."""
    if key_mask is None:
        return other, (0, 0)
    stride = key_mask.stride()
    return key_mask.view(torch.uint8), (stride[0], stride[1])
