"""Launches of bidirectional attention and its gradients with the kernels that serve the shape."""

import torch
from torch import Tensor

from linattn.kernels.bidirectional.config import (
    Config,
    Inputs,
    fits_one_program,
    fits_programs,
    joins_gradients,
    long_config,
    short_config,
)
from linattn.kernels.bidirectional.joined import backward_joined_long, backward_joined_short
from linattn.kernels.bidirectional.long import gather, key_grad, query_grad, read
from linattn.kernels.bidirectional.maps import Grads, arguments_of, new_grads, summed
from linattn.kernels.bidirectional.short import launch_backward, launch_forward
from linattn.kernels.bidirectional.wide import backward_wide
from linattn.kernels.common.layout import like_tokens


def forward(x: Inputs, output: Tensor, state: Tensor, config: Config | None = None) -> None:
    w = x.widths
    if fits_one_program(x):
        launch_forward(x, w, output, state, config or short_config(x))
        return
    assert x.maps is None or fits_programs(x), "no kernel runs these maps itself: see can_fuse"
    of_query, of_key = arguments_of(x)
    by_key, by_query = config or long_config(x, "gather"), config or long_config(x, "read")
    gather(x, w, x.k, x.v, None, None, x.key_mask, x.initial, True, of_key, state, by_key)
    read(x, w, state, of_query, output, by_query)


def backward(
    x: Inputs, d_output: Tensor, d_state: Tensor | None, state: Tensor, d_initial: Tensor,
    learn: tuple[bool, bool] = (False, False), config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor, Grads, Grads]:  # fmt: skip
    """Gradients of q, k, v and the parameters of both maps; that of the initial state is written to ``d_initial``."""
    # If no state was stored, a gradient of it may still be handed over: it is empty, and nothing is read.
    d_state = None if d_state is None or d_state.numel() == 0 else d_state.contiguous()
    w = x.widths
    joined = joins_gradients(x, d_state)
    shape = () if w.flows == 1 or joined else (w.flows,)
    dq, dk = (like_tokens(like, w.D, copies=shape) for like in (x.q, x.k))
    dv = like_tokens(x.v, x.v.shape[3])
    query, key = (None, None) if x.maps is None else (x.maps.query, x.maps.key)
    if fits_one_program(x) and joined:
        of_query, of_key = backward_joined_short(x, w, d_output, dq, dk, dv, learn, config)
    elif fits_one_program(x):
        config = config or short_config(x, backward=True)
        of_query, of_key = launch_backward(x, w, d_output, d_state, dq, dk, dv, d_initial, learn, config)
    else:
        total = d_initial if x.initial is not None else torch.empty_like(state)
        if joined:
            of_query, of_key = backward_joined_long(x, w, d_output, state, dq, dk, dv, total, learn, config)
        elif fits_programs(x):
            by_query, by_key = config or long_config(x, "query_grad"), config or long_config(x, "key_grad")
            of_query = query_grad(x, w, d_output, d_state, state, dq, total, learn[0], by_query)
            of_key = key_grad(x, w, total, dk, dv, learn[1], by_key)
        else:
            config = config or long_config(x, "key_grad")
            backward_wide(x, w, d_output, d_state, state, dq, dk, dv, total, config)
            of_query, of_key = (new_grads(None, 1, 1, like, 1, w, False) for like in (x.q, x.k))
    if shape:
        parts = (x.q, dq), (x.k, dk)
        dq, dk = (torch.add(d[0], d[1], out=like_tokens(like, w.D)) for like, d in parts)
    return dq, dk, dv, summed(of_query, query), summed(of_key, key)
