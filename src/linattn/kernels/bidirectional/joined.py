"""Backward launches of programs that serve both flows of a head, so that no gradient is written twice and added."""

from torch import Tensor

from linattn.kernels.bidirectional.config import Config, Inputs, Widths, joined_config, segments_for
from linattn.kernels.bidirectional.long import add_parts
from linattn.kernels.bidirectional.maps import Arguments, Grads, arguments_of, new_grads
from linattn.kernels.bidirectional.short import mask_of
from linattn.kernels.common.launching import launch
from linattn.kernels.common.layout import is_token_major
from linattn.kernels.common.support import padded


def backward_joined_short(
    x: Inputs, w: Widths, d_output: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, learn: tuple[bool, bool],
    config: Config | None,
) -> tuple[Grads, Grads]:  # fmt: skip
    """One program per key head."""
    from linattn.kernels.bidirectional.device.joined_backward import bidirectional_joined_backward as kernel

    assert x.maps is not None
    (B, H_kv, Tk, _), H, Tq = x.k.shape, x.q.shape[1], x.q.shape[2]
    d_query = new_grads(x.maps.query, 1, B, x.q, H_kv, w, learn[0])
    d_key = new_grads(x.maps.key, 1, B, x.k, H_kv, w, learn[1])
    if B * H_kv == 0:
        return d_query, d_key
    by_key = config or joined_config("key_grad")
    config = config or joined_config("short")
    mask, mask_strides = mask_of(x.key_mask, x.k)
    of_query, of_key = arguments_of(x)
    launch(
        kernel, B * H_kv,
        x.q, x.k, x.v, d_output, mask, dq, dk, dv,
        of_query.pointers[0], of_key.pointers[0], d_query.table, d_key.table,
        *x.q.stride(), *x.k.stride(), *x.v.stride(), *d_output.stride(), *mask_strides,
        *of_query.table_strides, *_of_keys(of_key), H_kv, H // H_kv, Tq, Tk, x.eps,
        NORM=x.norm, HAS_MASK=x.key_mask is not None, GROUPED=H // H_kv > 1, LEARN_Q=learn[0], LEARN_K=learn[1],
        SPLIT=config.split, BY_TOKEN_Q=is_token_major(dq), BY_TOKEN_K=is_token_major(dk), BY_TOKEN_V=is_token_major(dv),
        D=w.D, V=w.V, BV=padded(w.V), BT_K=by_key.BT, STAGES_K=by_key.stages,
        **config.options(),
    )  # fmt: skip
    return d_query, d_key


def backward_joined_long(
    x: Inputs, w: Widths, d_output: Tensor, state: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, total: Tensor,
    learn: tuple[bool, bool], config: Config | None,
) -> tuple[Grads, Grads]:  # fmt: skip
    """Programs share a sequence; total, as large as the state, takes the state's gradient."""
    from linattn.kernels.bidirectional.device import joined_long as kernels

    assert x.maps is not None
    N, (_, H, Tq, _), (_, H_kv, Tk, _) = state.shape[0], x.q.shape, x.k.shape
    by_query, by_key = config or joined_config("query_grad"), config or joined_config("key_grad")
    for_queries = segments_for(N * H_kv, Tq * (H // H_kv), by_query, x.q.device)
    for_keys = segments_for(N * H_kv, Tk, by_key, x.q.device)
    d_query = new_grads(x.maps.query, for_queries, N, x.q, H_kv, w, learn[0])
    d_key = new_grads(x.maps.key, for_keys, N, x.k, H_kv, w, learn[1])
    if state.numel() == 0:
        return d_query, d_key
    of_query, of_key = arguments_of(x)
    packed = x.cu_seqlens is not None
    bounds = state if x.cu_seqlens is None else x.cu_seqlens
    partial = total.unsqueeze(0) if for_queries == 1 else total.new_empty(for_queries, *total.shape)
    launch(
        kernels.bidirectional_joined_query_grad, N * H_kv * for_queries,
        x.q, d_output, state, bounds, dq, partial, of_query.pointers[0], d_query.table, of_key.pointers[0],
        *x.q.stride(), *d_output.stride(), *of_query.table_strides, *_of_keys(of_key),
        N, H_kv, H // H_kv, Tq, for_queries, x.eps,
        NORM=x.norm, PACKED=packed, GROUPED=H // H_kv > 1, LEARN_Q=learn[0], SPLIT=by_query.split,
        BY_TOKEN=is_token_major(dq), D=w.D, V=w.V, BV=padded(w.V), **by_query.options(),
    )  # fmt: skip
    add_parts(partial, None, total)
    mask, mask_strides = mask_of(x.key_mask, x.k)
    launch(
        kernels.bidirectional_joined_key_grad, N * H_kv * for_keys,
        x.k, x.v, total, mask, bounds, dk, dv, of_key.pointers[0], d_key.table,
        *x.k.stride(), *x.v.stride(), *mask_strides, *_of_keys(of_key), N, H_kv, Tk, for_keys,
        HAS_MASK=x.key_mask is not None, PACKED=packed, LEARN_K=learn[1], SPLIT=by_key.split,
        BY_TOKEN_K=is_token_major(dk), BY_TOKEN_V=is_token_major(dv),
        D=w.D, V=w.V, BV=padded(w.V), STAGES=by_key.stages, **by_key.options(),
    )  # fmt: skip
    return d_query, d_key


def _of_keys(side: Arguments) -> tuple[int, int, int]:
    """Strides of the keys' table: a sequence, a head, a flow."""
    batch, head, _, flow = side.table_strides
    return batch, head, flow
