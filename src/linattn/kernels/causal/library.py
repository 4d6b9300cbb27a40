"""Causal attention, and decays in both directions, by Triton kernels as operators of torch's library."""

import torch
from torch import Tensor

from linattn.kernels.causal import both_ways
from linattn.kernels.causal.config import is_tried
from linattn.kernels.causal.passes import Border, Gates, Marks, Passes, State
from linattn.kernels.causal.token_gradients import correct_denominator, decay_gradient, normalizer_gradient
from linattn.kernels.causal.widths import reachable, reachable_gradient
from linattn.kernels.common.direct import shortest
from linattn.kernels.common.gradients import or_zeros, whole_state
from linattn.kernels.common.layout import like_tokens
from linattn.kernels.common.replaying import replayed
from linattn.ops.shared.call import refuse_second_derivatives


def _forward(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None, z: Tensor | None, log_decay: Tensor | None,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, key_index: bool, norm: int, eps: float,
    out_dtype: torch.dtype, need_state: bool, both: bool, log_input: Tensor | None = None, tf32: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, row sums (empty with norm 0) and the state after the last token (empty unless needed).

    norm: 0 none, 1 sum, 2 abs_max_one. both: whether the strict sweep against time is added before the division; its
    own row sums then follow those of both sweeps. log_input: log weights of keys, only beside a decay. tf32: whether
    fp32 multiplies in tf32.
    """
    p = _passes(q, k, v, log_decay, key_mask, cu_seqlens, key_index, norm, eps, log_input=log_input, tf32=tf32)
    N, _, HS, _, K, V = p.sizes
    if both and both_ways.serves(p):
        out, sums = both_ways.attend(p, q, out_dtype)
        return out, _fp32(q, 0) if sums is None else sums, _fp32(q, 0), _fp32(q, 0)
    initial = _state(kv, z)
    out = like_tokens(q, V, out_dtype)
    sums = _fp32(q, 1 + both, *q.shape[:3]) if norm else None
    den = None if sums is None else sums[0]
    prev = prev_den = made = None
    decay, with_z = p.potentials(False), norm > 0 or need_state
    border = p.borders(p.k, p.v, initial, decay, reverse=False, with_z=with_z, with_last=need_state)
    last = border.last
    own_last = (_fp32(q, N, HS, K, V), _fp32(q, N, HS, K)) if need_state and last is None else None
    turns = [(border, decay)]
    if both:
        decay = p.potentials(True)
        turns.append((p.borders(p.k, p.v, None, decay, reverse=True, with_z=norm > 0, with_last=False), decay))
    if sums is not None:
        made = p.row_factors(sums, turns, None if own_last is None else own_last[1])
    if both:
        # Sums without their division may leave the range of fp16.
        prev = like_tokens(q, V, torch.float32) if out_dtype == torch.float16 else out
        prev_den = None if sums is None else sums[1]
        p.sweep(
            "output", p.q, p.k, p.v, prev, *turns[1], against=True, den=prev_den, divide=False, z=norm > 0, made=made
        )  # fmt: skip
    p.sweep(
        "output", p.q, p.k, p.v, out, *turns[0], against=False, den=den, prev=prev, prev_den=prev_den,
        z=with_z, last=own_last or (None, None), made=made,
    )  # fmt: skip
    return out, _fp32(q, 0) if sums is None else sums, *(last or own_last or (_fp32(q, 0), _fp32(q, 0)))


def _backward(
    d_out: Tensor, d_kv: Tensor | None, d_z: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None, z: Tensor | None, log_decay: Tensor | None,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, out: Tensor, den: Tensor,
    key_index: bool, norm: int, eps: float, both: bool, need_decay: bool,
    log_input: Tensor | None = None, need_input: bool = False, tf32: bool = False,
    need_q: bool = True, need_k: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, the initial state's kv and z, log_decay and log_input; empty where there is nothing."""
    need_decay = need_decay and log_decay is not None
    need_input = need_input and log_input is not None
    # Features that are all 1 need no gradient. But the walk that makes it also makes what a decay or a state needs.
    need_q, need_k = need_q or need_decay, need_k or need_decay or need_input or kv is not None
    p = _passes(q, k, v, log_decay, key_mask, cu_seqlens, key_index, norm, eps, need_decay, log_input, tf32)
    N, _, HS, T, K, V = p.sizes
    dq, dk, dv = (_like(x, need) for x, need in ((q, need_q), (k, need_k), (v, True)))
    q, k, v, d_out = p.q, p.k, p.v, reachable_gradient(d_out)
    initial, d_last = _state(kv, z), _state(d_kv, d_z)
    d_first = (_fp32(q, N, HS, K, V), _fp32(q, N, HS, K)) if initial is not None else None
    da = _fp32(q, k.shape[0], HS, T) if need_decay else _fp32(q, 0)
    di = torch.zeros(k.shape[:3], dtype=torch.float32, device=q.device) if need_input else _fp32(q, 0)
    rows = normalizer_gradient(p, out, d_out, den[0]) if norm else None
    with_z = norm > 0 or d_last is not None
    turns: list[tuple[Gates | None, Tensor | None, Marks | None]] = []
    for against in (False, True) if both else (False,):
        decay = p.potentials(against)
        if not need_q:
            turns.append((decay, None, None))
            continue
        marks = p.marks(with_z) if need_decay else None
        states = p.borders(k, v, initial, decay, reverse=against, with_z=with_z, with_last=False)
        q_dots = p.sweep(
            "dq", d_out, v, k, dq, states, decay, against=against, rows=rows,
            u=q if need_decay else None, prev=dq if against else None, z=with_z, marks=marks,
        )  # fmt: skip
        turns.append((decay, q_dots, marks))
    if rows is not None and turns[0][1] is not None:
        correct_denominator(p, rows, den, turns[0][1], turns[1][1] if both else None)
    for against in (False, True) if both else (False,):
        decay, q_dots, marks = turns.pop(0)
        d_marks = p.marks(with_z) if need_decay else None
        add_k, add_v = (dk, dv) if against else (None, None)
        grads = p.borders(
            q, d_out, d_last, decay, reverse=not against, with_z=with_z, with_last=d_first is not None,
            rows=rows,
        )  # fmt: skip
        own_first = d_first if grads.last is None else None
        k_dots = None
        if need_k:
            k_dots = p.sweep(
                "dk", v, d_out, q, dk, grads, decay, against=against, rows=rows,
                u=k if need_decay or need_input else None, prev=add_k, z=with_z, marks=d_marks,
                last=(None, own_first[1] if own_first is not None and with_z else None),
            )  # fmt: skip
        p.sweep(
            "dv", k, q, d_out, dv, grads, decay, against=against, rows=rows, prev=add_v,
            last=(own_first[0] if own_first is not None else None, None),
        )  # fmt: skip
        if need_input and k_dots is not None:
            di += k_dots.sum((0, 1))  # including the diagonal
        if q_dots is not None and k_dots is not None and marks is not None and d_marks is not None:
            decay_gradient(p, da, q_dots, k_dots, marks, d_marks, against=against, start=initial is not None)
        del q_dots, k_dots, marks, d_marks  # the states of a turn are large
        d_first = _first(d_first, grads, with_z)
    if need_decay and log_decay is not None and log_decay.ndim == 1:
        da = da.sum((0, 2), dtype=torch.float64).to(da.dtype)  # many numbers that nearly cancel
    return dq, dk, dv, *(d_first or (_fp32(q, 0), _fp32(q, 0))), da, di


_forward, _backward = replayed(_forward, unless=is_tried), replayed(_backward, unless=is_tried)
triton_causal = torch.library.custom_op("linattn::triton_causal", _forward, mutates_args=())
triton_causal_backward = torch.library.custom_op("linattn::triton_causal_backward", _backward, mutates_args=())


@triton_causal.register_fake
def _(q, k, v, kv, z, log_decay, key_mask, cu_seqlens, key_index, norm, eps, out_dtype, need_state, both, *rest):  # type: ignore[no-untyped-def]
    out = like_tokens(q, v.shape[3], out_dtype)
    den = _fp32(q, 1 + both, *q.shape[:3]) if norm else _fp32(q, 0)
    if not need_state:
        return out, den, _fp32(q, 0), _fp32(q, 0)
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return out, den, _fp32(q, N, *k.shape[1:2], k.shape[3], v.shape[3]), _fp32(q, N, k.shape[1], k.shape[3])


@triton_causal_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    d_out, d_kv, d_z, q, k, v, kv, z, log_decay, key_mask, cu_seqlens, out, den, key_index, norm, eps, both, need_decay,
    log_input=None, need_input=False, tf32=False, need_q=True, need_k=True,
):  # fmt: skip
    need_decay, need_input = need_decay and log_decay is not None, need_input and log_input is not None
    need_q, need_k = need_q or need_decay, need_k or need_decay or need_input or kv is not None
    grads = (_like(x, need) for x, need in ((q, need_q), (k, need_k), (v, True)))
    first = (_fp32(q, 0), _fp32(q, 0)) if kv is None else (_fp32(q, *kv.shape), _fp32(q, *z.shape))
    da = _fp32(q, *log_decay.shape) if need_decay else _fp32(q, 0)
    return *grads, *first, da, _fp32(q, *log_input.shape) if need_input else _fp32(q, 0)


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, key_index, norm, eps, _, need_state, both, log_input, tf32 = inputs
    ctx.save_for_backward(*tensors, *output[:2], log_input)
    ctx.options = key_index, norm, eps, both
    ctx.need_state, ctx.tf32 = need_state, tf32
    # The gradient of an unused output is None rather than a tensor of zeros, which would be made and read.
    ctx.set_materialize_grads(False)


def _gradients(ctx, d_out, d_den, d_kv, d_z, run=triton_causal_backward):  # type: ignore[no-untyped-def]
    # The row sums are only for this function and have no gradient.
    *saved, log_input = ctx.saved_tensors  # read once: gradient checkpointing returns them only once
    # Torch does not count an argument that has its default value.
    need_decay, need_input = ctx.needs_input_grad[5], log_input is not None and ctx.needs_input_grad[14]
    d_out = or_zeros(d_out, saved[8])
    d_state = whole_state(d_kv, d_z, saved[2].shape[3]) if ctx.need_state else (None, None)
    dq, dk, dv, d_kv, d_z, da, di = run(
        d_out, *d_state, *saved, *ctx.options, need_decay, log_input, need_input, ctx.tf32, *ctx.needs_input_grad[:2]
    )
    needed = (x if need else None for x, need in zip((dq, dk), ctx.needs_input_grad, strict=False))
    first = (None, None) if saved[3] is None else (d_kv, d_z)
    return *needed, dv, *first, da if need_decay else None, *(None,) * 8, di if need_input else None, None


triton_causal.register_autograd(_gradients, setup_context=_remember)
refuse_second_derivatives(triton_causal_backward, "kernels")
causal_directly = shortest(triton_causal, _forward, _backward, _remember, _gradients)


def _passes(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, key_mask: Tensor | None, cu_seqlens: Tensor | None,
    key_index: bool, norm: int, eps: float, learned: bool = False, log_input: Tensor | None = None,
    tf32: bool = False,
) -> Passes:  # fmt: skip
    mask = None if key_mask is None else key_mask.contiguous().view(torch.uint8)
    cu = None if cu_seqlens is None else cu_seqlens.contiguous()
    q, k, v = reachable(q), reachable(k), reachable(v)
    return Passes(q, k, v, log_decay, mask, cu, key_index, norm, eps, learned, log_input, tf32)


def _state(kv: Tensor | None, z: Tensor | None) -> State | None:
    return None if kv is None or z is None else (kv.contiguous(), z.contiguous())


def _first(d_first: State | None, grads: Border, with_z: bool) -> State | None:
    """The gradient of the initial state: as the sweeps wrote it, or the last result of the scan over segments."""
    if d_first is None:
        return None
    kv, z = d_first if grads.last is None else grads.last
    return kv, z if with_z else z.zero_()


def _like(x: Tensor, needed: bool) -> Tensor:
    return like_tokens(x, x.shape[3], x.dtype) if needed else x.new_empty(0)


def _fp32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)
