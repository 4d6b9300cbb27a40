"""Exponential attention on Triton kernels, as operators of torch's library."""

import torch
from torch import Tensor

from linattn.kernels.causal.widths import reachable, reachable_gradient
from linattn.kernels.common.direct import shortest
from linattn.kernels.common.gradients import or_zeros, whole_state
from linattn.kernels.common.layout import is_token_major, like_tokens
from linattn.kernels.common.replaying import replayed
from linattn.kernels.exponential.config import D_K, D_Q, D_V, OUTPUT, is_tried
from linattn.kernels.exponential.passes import Passes, State, Units
from linattn.ops.shared.call import refuse_second_derivatives


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_input: Tensor, log_decay: Tensor, kv: Tensor | None, z: Tensor | None,
    log_scale: Tensor | None, cu_seqlens: Tensor | None, scale: float, out_dtype: torch.dtype, need_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, final state (empty unless needed) with its unit (fp64), row sums, and the factors made of the gates."""
    p = _passes(q, k, v, log_input, log_decay, cu_seqlens)
    N, _, HS, _, K, V = p.sizes
    units = p.units(log_scale, scale)
    out = like_tokens(q, V, out_dtype)
    den = _fp32(q, *q.shape[:3])
    last = (_fp32(q, N, HS, K, V), _fp32(q, N, HS, K)) if need_state else None
    initial = p.borders(p.k, p.v, units.gates, units, _state(kv, z), last, reverse=False)
    made = p.row_factors(units, den, initial, last)
    p.walk(OUTPUT, None, out, units, den, start=initial, end=last, made=made)
    return out, *(last or (_fp32(q, 0), _fp32(q, 0))), units.last, den, *units[:3]


def _backward(
    d_out: Tensor, d_kv: Tensor | None, d_z: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, log_input: Tensor, log_decay: Tensor, kv: Tensor | None, z: Tensor | None,
    cu_seqlens: Tensor | None, out: Tensor, den: Tensor, gates: Tensor, keep: Tensor, spans: Tensor, need_gates: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, both gates and the initial state's kv and z; empty where there is nothing."""
    p = _passes(q, k, v, log_input, log_decay, cu_seqlens)
    N, H, HS, _, K, V = p.sizes
    units = Units(gates, keep, spans, den)
    d_out, initial = reachable_gradient(d_out), _state(kv, z)
    rows, a = p.rows(out, d_out, den, gates)
    marks = p.marks() if need_gates else None
    dq = like_tokens(q, K, q.dtype)
    # Each of the query heads that share a key head gives it a gradient; these are summed before they are rounded.
    dtype = q.dtype if H == HS else torch.float32
    dk, dv = (like_tokens(x, x.shape[3], dtype, heads=H) for x in (k, v))
    d_first = (_fp32(q, N, H, K, V), _fp32(q, N, H, K)) if initial is not None else None
    # The walk of dk has its state transposed.
    turned = (_fp32(q, N, H, V, K), d_first[1]) if d_first is not None else None
    states = p.borders(p.k, p.v, gates, units, initial, None, reverse=False)
    grads = p.borders(p.q, d_out, rows, units, _of_first(_state(d_kv, d_z), H), d_first, reverse=True)
    p.walk(D_Q, d_out, dq, units, den, rows=rows, start=states, marks=marks, dots=a if need_gates else None)
    b = p.dots(D_K) if need_gates else None
    p.walk(D_K, d_out, dk, units, den, rows=rows, start=grads, end=turned, marks=marks, dots=b)
    p.walk(D_V, d_out, dv, units, den, rows=rows, start=grads, end=d_first)
    d_gates = (_fp32(q, 0), _fp32(q, 0))
    if marks is not None and b is not None:
        d_gates = p.gate_gradients(a, b, marks.flows)
    dk, dv = (_summed(x, HS, like.dtype) for x, like in ((dk, k), (dv, v)))
    first = (_fp32(q, 0), _fp32(q, 0))
    if d_first is not None:
        first = _summed(d_first[0], HS, torch.float32), _summed(d_first[1], HS, torch.float32)
    return dq, dk, dv, *d_gates, *first


_forward, _backward = replayed(_forward, unless=is_tried), replayed(_backward, unless=is_tried)
triton_exponential = torch.library.custom_op("linattn::triton_exponential", _forward, mutates_args=())
triton_exponential_backward = torch.library.custom_op(
    "linattn::triton_exponential_backward", _backward, mutates_args=()
)


@triton_exponential.register_fake
def _(q, k, v, log_input, log_decay, kv, z, log_scale, cu_seqlens, scale, out_dtype, need_state):  # type: ignore[no-untyped-def]
    p = Passes(q, k, v, log_input, log_decay, cu_seqlens)
    N, _, HS, _, K, V = p.sizes
    out = like_tokens(q, V, out_dtype)
    last = (_fp32(q, N, HS, K, V), _fp32(q, N, HS, K)) if need_state else (_fp32(q, 0), _fp32(q, 0))
    factors = _fp32(q, *log_input.shape, 2), _fp32(q, *log_input.shape)
    spans = q.new_empty(log_input.shape[0] * HS, p.places(p.length), dtype=torch.int32)
    return out, *last, q.new_empty(N, HS, dtype=torch.float64), _fp32(q, *q.shape[:3]), *factors, spans


@triton_exponential_backward.register_fake
def _(d_out, d_kv, d_z, q, k, v, log_input, log_decay, kv, z, *rest):  # type: ignore[no-untyped-def]
    grads = (like_tokens(x, x.shape[3], x.dtype) for x in (q, k, v))
    gates = [_fp32(q, *(log_input.shape if rest[-1] else (0,))) for _ in range(2)]
    first = (_fp32(q, 0), _fp32(q, 0)) if kv is None else (_fp32(q, *kv.shape), _fp32(q, *z.shape))
    return *grads, *gates, *first


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, log_input, log_decay, kv, z, _, cu_seqlens, *_, need_state = inputs
    out, _, _, _, *kept = output
    ctx.save_for_backward(q, k, v, log_input, log_decay, kv, z, cu_seqlens, out, *kept)
    ctx.dtypes = log_input.dtype, log_decay.dtype
    ctx.need_state = need_state
    # The gradient of an unused output is None rather than a tensor of zeros, which would be made and read.
    ctx.set_materialize_grads(False)


def _gradients(ctx, d_out, d_kv, d_z, *_, run=triton_exponential_backward):  # type: ignore[no-untyped-def]
    """Gradients in which the running maximum, which cancels from all results, is a constant except for its start."""
    saved = ctx.saved_tensors  # read once: gradient checkpointing returns them only once
    kv, z, out = saved[5], saved[6], saved[8]
    d_out = or_zeros(d_out, out)
    need_gates = any(ctx.needs_input_grad[3:5])
    d_state = whole_state(d_kv, d_z, out.shape[3]) if ctx.need_state else (None, None)
    dq, dk, dv, d_i, d_f, d_kv, d_z = run(d_out, *d_state, *saved, need_gates)
    d_start = None
    if kv is not None and ctx.needs_input_grad[7]:
        d_start = ((kv * d_kv).sum((2, 3)) + (z * d_z).sum(2)).double()
    gates = (d_i.to(ctx.dtypes[0]), d_f.to(ctx.dtypes[1])) if need_gates else (None, None)
    first = (None, None) if kv is None else (d_kv, d_z)
    return dq, dk, dv, *gates, *first, d_start, *(None,) * 4


triton_exponential.register_autograd(_gradients, setup_context=_remember)
refuse_second_derivatives(triton_exponential_backward, "kernels")
exponential_directly = shortest(triton_exponential, _forward, _backward, _remember, _gradients)


def _passes(q: Tensor, k: Tensor, v: Tensor, log_input: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None) -> Passes:
    cu = None if cu_seqlens is None else cu_seqlens.contiguous()
    return Passes(reachable(q), reachable(k), reachable(v), log_input, log_decay, cu)


def _state(kv: Tensor | None, z: Tensor | None) -> State | None:
    return None if kv is None or z is None else (kv.contiguous(), z.contiguous())


def _of_first(state: State | None, heads: int) -> State | None:
    """A gradient per key head as one per query head: the first query head of each key head has it, the others 0."""
    if state is None or state[0].shape[1] == heads:
        return state
    group = heads // state[0].shape[1]
    kv, z = (torch.stack([x, *[torch.zeros_like(x)] * (group - 1)], dim=2).flatten(1, 2) for x in state)
    return kv, z


def _summed(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """x summed over the query heads of each key head, in the memory order of x."""
    if x.shape[1] == heads:
        return x
    if x.ndim == 4 and is_token_major(x):
        return x.transpose(1, 2).unflatten(2, (heads, -1)).sum(3).to(dtype).transpose(1, 2)
    return x.unflatten(1, (heads, -1)).sum(2).to(dtype)


def _fp32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)
