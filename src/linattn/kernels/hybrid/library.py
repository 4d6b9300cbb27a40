"""Hybrid attention on Triton kernels, as operators of torch's library."""

import torch
from torch import Tensor

from linattn.kernels.causal.widths import reachable_gradient
from linattn.kernels.common.direct import shortest
from linattn.kernels.common.gradients import or_zeros
from linattn.kernels.hybrid.passes import Passes, Saved, Slots, State, readable
from linattn.ops.hybrid.rows import take
from linattn.ops.shared.call import refuse_second_derivatives


def _forward(
    q: Tensor, k: Tensor, v: Tensor, phi: Tensor | None, psi: Tensor | None, gate: Tensor | None,
    kv: Tensor | None, z: Tensor | None, old_k: Tensor | None, old_v: Tensor | None, old_psi: Tensor | None,
    index: Tensor | None, begin: Tensor | None, end: Tensor | None, spans: Tensor | None, ends: Tensor | None,
    slots: Tensor | None, joining: Tensor | None, first: Tensor, chunk: int, back: int, window: int, sliding: bool,
    scale: float, eps: float, one: bool, best: bool, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, and what its gradients need: level and share of the rows, and their strongest keys.

    kv, z: initial sums, fp32. old_k ..: chosen tokens of a state, the first slots of the list. index .. joining: see
    ``Listed``. first: the first token of each row that exists. best: whether gradients flow through row maxima.
    """
    p = _passes(
        q, k, v, phi, psi, gate, old_k, old_v, old_psi, index, begin, end, spans, ends, slots, joining, first, chunk,
        back, window, sliding, scale, best,
    )  # fmt: skip
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=out_dtype, device=q.device)
    saved = _room(q, best)
    p.outputs(p.states(_state(kv, z)), out, saved, eps, one)
    return out, *saved


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, phi: Tensor | None, psi: Tensor | None, gate: Tensor | None,
    kv: Tensor | None, z: Tensor | None, old_k: Tensor | None, old_v: Tensor | None, old_psi: Tensor | None,
    index: Tensor | None, begin: Tensor | None, end: Tensor | None, spans: Tensor | None, ends: Tensor | None,
    slots: Tensor | None, joining: Tensor | None, first: Tensor, out: Tensor, level: Tensor, share: Tensor,
    best_key: Tensor, chunk: int, back: int, window: int, sliding: bool, scale: float, best: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the first eleven inputs of ``triton_hybrid``; empty where there is nothing."""
    p = _passes(
        q, k, v, phi, psi, gate, old_k, old_v, old_psi, index, begin, end, spans, ends, slots, joining, first, chunk,
        back, window, sliding, scale, best,
    )  # fmt: skip
    d_out, saved = readable(reachable_gradient(d_out)), Saved(level, share, best_key)
    initial = _state(kv, z)
    states = p.states(initial)
    d_q, d_phi, d_gate, delta, flow = p.query_gradients(d_out, out, states, saved)
    del states  # states and their gradients are large
    d_first = None if initial is None else (torch.empty_like(initial[0]), torch.empty_like(initial[1]))
    d_states = p.state_gradients(d_out, share, delta, d_first)
    of_list = p.list_gradients(d_out, saved, delta, flow, d_states)
    d_k, d_v, d_psi = p.key_gradients(d_out, saved, delta, flow, d_states, of_list)
    d_old: list[Tensor] = []
    for i, old in enumerate((old_k, old_v, old_psi)):
        found = None if of_list is None else of_list[i]
        if old is None:
            d_old.append(_nothing(q))
        else:
            d_old.append(torch.zeros_like(old) if found is None else found[:, :, : old.shape[2]].to(old))
    d_phi, d_psi, d_gate = (_nothing(q) if x is None else x for x in (d_phi, d_psi, d_gate))
    d_kv, d_z = d_first or (_nothing(q), _nothing(q))
    return d_q, d_k, d_v, d_phi, d_psi, d_gate, d_kv, d_z, d_old[0], d_old[1], d_old[2]


triton_hybrid = torch.library.custom_op("linattn::triton_hybrid", _forward, mutates_args=())
triton_hybrid_backward = torch.library.custom_op("linattn::triton_hybrid_backward", _backward, mutates_args=())


@triton_hybrid.register_fake
def _(q, k, v, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=rest[-1]), *_room(q, rest[-2])


@triton_hybrid_backward.register_fake
def _(d_out, *inputs):  # type: ignore[no-untyped-def]
    q = inputs[0]
    return tuple(_nothing(q) if x is None else x.new_empty(x.shape) for x in inputs[:11])


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:19], *output)
    chunk, back, window, sliding, scale, _, _, best, _ = inputs[19:]
    ctx.options = chunk, back, window, sliding, scale, best
    # The gradient of an unused output is None rather than a tensor of zeros, which would be made.
    ctx.set_materialize_grads(False)


def _gradients(ctx, d_out, *_, run=triton_hybrid_backward):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # read once: gradient checkpointing returns them only once
    found = run(or_zeros(d_out, saved[19]), *saved, *ctx.options)
    given = ctx.needs_input_grad[:11]
    return *(x if needed else None for x, needed in zip(found, given, strict=True)), *(None,) * 17


triton_hybrid.register_autograd(_gradients, setup_context=_remember)
refuse_second_derivatives(triton_hybrid_backward, "kernels")
hybrid_directly = shortest(triton_hybrid, _forward, _backward, _remember, _gradients)


def _passes(
    q: Tensor, k: Tensor, v: Tensor, phi: Tensor | None, psi: Tensor | None, gate: Tensor | None,
    old_k: Tensor | None, old_v: Tensor | None, old_psi: Tensor | None,
    index: Tensor | None, begin: Tensor | None, end: Tensor | None, spans: Tensor | None, ends: Tensor | None,
    slots: Tensor | None, joining: Tensor | None, first: Tensor, chunk: int, back: int, window: int, sliding: bool,
    scale: float, best: bool,
) -> Passes:  # fmt: skip
    chosen = None
    if index is not None:
        assert begin is not None
        assert end is not None
        assert spans is not None
        assert ends is not None
        assert slots is not None
        features = _list(old_psi, psi, index) if joining is not None and psi is not None else None
        joining = None if features is None else joining
        list_k, list_v = _list(old_k, k, index), _list(old_v, v, index)
        chosen = Slots(list_k, list_v, features, begin, end, spans, ends, slots, joining)
    phi, psi, gate = (None if x is None else readable(x) for x in (phi, psi, gate))
    return Passes(
        readable(q), readable(k), readable(v), phi, psi, gate, chosen, first, chunk, back, window, sliding, scale, best
    )


def _list(old: Tensor | None, new: Tensor, index: Tensor) -> Tensor:
    """The list ``(B, H_kv, N, .)``, contiguous: tokens of a state, then those at ``index`` of the rows."""
    found = take(new, index)
    return found if old is None else torch.cat([old.to(found), found], 2)


def _room(q: Tensor, best: bool) -> Saved:
    level = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    shape = q.shape[:3] if best else (0,)
    return Saved(level, torch.empty_like(level), torch.empty(shape, dtype=torch.int32, device=q.device))


def _state(kv: Tensor | None, z: Tensor | None) -> State | None:
    return None if kv is None or z is None else (kv.contiguous(), z.contiguous())


def _nothing(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=like.device)
