"""``hybrid_attention``: exact softmax over a window and chosen tokens, linear attention over the rest, one denominator.

m_t = max of s_ti over exact i,     s_ti = scale q_t . k_i
o_t = (sum_exact e^{s_ti - m_t} v_i + g_t * sum_rest (phi_t . psi_i) v_i)
    / (sum_exact e^{s_ti - m_t}     +       sum_rest (phi_t . psi_i))
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor

from linattn.ops.checks import autocast_dtype, check_tensor
from linattn.ops.choice import Choice, choose
from linattn.ops.chunked.hybrid import hybrid_sums as chunked
from linattn.ops.hybrid_call import HybridCall, HybridOptions, StepOptions
from linattn.ops.hybrid_layout import packing
from linattn.ops.hybrid_rows import build_rows
from linattn.ops.hybrid_state import empty_cache, empty_state, final_state
from linattn.ops.hybrid_types import HybridOutput, HybridState, HybridSums, Layout, Rows, SalientBudget, Units
from linattn.ops.packing import compute_dtype
from linattn.ops.prepare import hide, without_autocast
from linattn.ops.recurrent.decoding import DecodingState
from linattn.ops.recurrent.decoding_step import StepToken, decoding_step
from linattn.ops.recurrent.hybrid import Token, hybrid_step
from linattn.ops.reference.hybrid import hybrid_sums as reference
from linattn.ops.triton.hybrid import attend as kernels

FORMS: dict[str, Callable[[Rows], HybridSums]] = {"reference": reference, "chunked": chunked}
LARGEST_EXPONENT = 80.0  # e^80 is finite in fp32; a linear part that small besides logits below -80 is next to 0


def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    features: tuple[Tensor, Tensor] | None = None,
    window: int = 64,
    layout: Layout = "sliding",
    delay: int = 1,
    salient: Tensor | None = None,
    budget: SalientBudget | None = None,
    scores: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float | None = None,
    units: Units = "row_max",
    eps: float = 1e-6,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
    validate: bool | None = None,
) -> Tensor:
    """Causal attention that is exact where it counts and linear elsewhere.

    Every token up to the query is either exact or linear:

    ``o_t = (sum_exact e^{s_ti - m_t} v_i + g_t * sum_linear w_ti v_i) / (sum_exact e^{s_ti - m_t} + sum_linear w_ti)``

    with ``s_ti = scale q_t . k_i``, ``m_t`` the largest exact one and ``w_ti = phi_t . psi_i``. Weights of the exact
    part are at most 1, so nothing overflows, and one of them is 1, so nothing is divided by 0. A row without exact keys
    is linear attention, with ``eps`` added to its denominator; one without linear keys is softmax attention.
    Gradients are the true ones, that of ``m_t`` too; the choice of tokens has none.

    Args:
        q: ``(B, H, T, K)``.
        k: ``(B, H_kv, T, K)``; ``H_kv`` divides ``H``, and query heads ``g H/H_kv ...`` share key head g.
        v: ``(B, H_kv, T, V)``.
        features: ``phi (B, H, T, F)`` of the queries and ``psi (B, H_kv, T, F)`` of the keys, not negative. A factor on
            phi weighs the linear part. None: there is no linear part, tokens that are not exact are not seen.
        window: tokens that are exact: the last ones up to the query, or the size of a chunk. 0: none.
        layout: ``"sliding"``: the window ends at each query. ``"chunks"``: a query sees its own chunk up to itself and
            ``delay`` whole chunks before. Chunks are counted from the first real token of a sequence.
        delay: see layout; 1 is what STILL and LoLCATs have.
        salient: tokens that stay exact for good, by name: bool ``(B, H_kv, T)``, or indices ``(B, H_kv, N)``; -1
            names none.
        budget: choose such tokens by their scores instead: the best of each chunk. In chunks the choice counts when the
            window lets go of the chunk, so no query sees a choice that later tokens had a part in before they came.
        scores: ``(B, H_kv, T)``, higher is kept rather; without gradients. None: how much a token attends to itself
            among the last ``budget.chunk`` tokens, measured by ``budget.score`` and ``budget.reduce``; see
            :func:`linattn.ops.saliency.self_saliency`.
        gate: ``g (B, H, T, V)``, on the numerator of the linear part; None: 1.
        scale: factor on q in the exact part; None: ``K**-0.5``.
        units: what a linear weight is compared to. ``"row_max"``: it counts as ``e^{s - m_t}`` does, as in LoLCATs and
            STILL: relative to the strongest exact key, whatever that is. ``"one"``: as ``e^s`` does, so that a strong
            exact key outweighs the rest, and for features that approximate the exponential itself.
        eps: added to the denominators of rows without exact keys.
        key_mask: ``(B, T)`` bool, True = real token. A masked token is in no sum and does not advance a position.
        cu_seqlens: ``(N+1,)`` offsets of N sequences packed into one row (B = 1); none sees another. They are laid out
            in rows of the longest, for which a GPU must be waited for.
        impl: ``"auto"``, ``"reference"``, ``"recurrent"``, ``"chunked"`` or ``"triton"``; see :func:`explain`.
        validate: check values too (offsets, indices, scores). None: on the CPU only, it costs a sync.

    Returns:
        ``(B, H, T, V)`` in the dtype of v (under autocast, in the dtype of autocast); 0 at masked tokens.

    Example:
        A window of 16, one token in 8 of the rest, and a linear part:

        >>> import torch
        >>> from linattn.ops.hybrid import hybrid_attention
        >>> from linattn.ops.hybrid_types import SalientBudget
        >>> q, k, v = torch.randn(3, 1, 4, 256, 32).unbind()
        >>> features = q.softmax(-1), k.softmax(-1)
        >>> budget = SalientBudget(ratio=1 / 8, chunk=16)
        >>> hybrid_attention(q, k, v, features=features, window=16, layout="chunks", budget=budget).shape
        torch.Size([1, 4, 256, 32])
    """
    call = HybridCall(
        q, k, v, features, window, layout, delay, salient, budget, scores, gate, scale, units, eps, key_mask,
        cu_seqlens, validate,
    )  # fmt: skip
    return _run(call, impl).output


def hybrid_attention_with_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: HybridState | None = None,
    impl: str = "auto",
    **options: Unpack[HybridOptions],
) -> HybridOutput:
    """:func:`hybrid_attention`, with its options, that starts from a state and returns the one after the last token.

    A sequence cut anywhere, with the state handed over, gives what the whole gives. Options of the window and the
    budget must be the same each time. With ``cu_seqlens`` the state has one row per sequence.

    Example:
        >>> import torch
        >>> from linattn.ops.hybrid import hybrid_attention_with_state
        >>> q, k, v = torch.randn(3, 1, 2, 10, 4).unbind()
        >>> output, state = hybrid_attention_with_state(q, k, v, features=(q.exp(), k.exp()), window=3)
        >>> output.shape, state.length.tolist(), state.window.k.shape, state.linear.kv.shape
        (torch.Size([1, 2, 10, 4]), [10], torch.Size([1, 2, 3, 4]), torch.Size([1, 2, 4, 4]))
    """
    return _run(HybridCall(q, k, v, initial_state=initial_state, need_state=True, **options), impl)


def hybrid_attention_step(
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    state: HybridState | None,
    *,
    features: tuple[Tensor, Tensor] | None = None,
    salient: Tensor | None = None,
    scores: Tensor | None = None,
    gate: Tensor | None = None,
    **options: Unpack[StepOptions],
) -> HybridOutput:
    """One token of :func:`hybrid_attention`: ``q_t (B, H, K)``, ``k_t (B, H_kv, K)``, ``v_t (B, H_kv, V)``.

    ``features``, ``salient (B, H_kv)`` bool, ``scores (B, H_kv)`` and ``gate (B, H, V)`` are that token's; the other
    options are those of the whole. A state of None is empty. Returns the output ``(B, H, V)`` and the next state. With
    a cap its time and memory are constant, and a GPU is not waited for; without one it is, for room in the cache.

    Example:
        >>> import torch
        >>> from linattn.ops.hybrid import hybrid_attention_step
        >>> state = None
        >>> for q, k, v in torch.randn(5, 3, 1, 2, 4):
        ...     output, state = hybrid_attention_step(q, k, v, state, features=(q.exp(), k.exp()), window=3)
        >>> output.shape, state.length.tolist()
        (torch.Size([1, 2, 4]), [5])
    """
    for name, x, shape in (("q_t", q_t, "(B, H, K)"), ("k_t", k_t, "(B, H_kv, K)"), ("v_t", v_t, "(B, H_kv, V)")):
        check_tensor(name, x, shape, 3)
    pair = features
    if isinstance(features, tuple) and len(features) == 2:
        for name, x in (("features[0]", features[0]), ("features[1]", features[1])):
            check_tensor(name, x, "(B, heads, F)", 3)
        pair = features[0].unsqueeze(2), features[1].unsqueeze(2)
    if salient is not None and (not isinstance(salient, Tensor) or salient.dtype != torch.bool or salient.ndim != 2):
        raise TypeError("salient must be a bool tensor (B, H_kv): whether this token stays exact")
    if scores is not None:
        check_tensor("scores", scores, "(B, H_kv)", 2)
    if gate is not None:
        check_tensor("gate", gate, "(B, H, V)", 3)
    more = {name: None if x is None else x.unsqueeze(2) for name, x in
            (("salient", salient), ("scores", scores), ("gate", gate))}  # fmt: skip
    q, k, v = (x.unsqueeze(2) for x in (q_t, k_t, v_t))
    call = HybridCall(q, k, v, features=pair, initial_state=state, need_state=True, **more, **options)
    out = _run(call, "auto")
    return HybridOutput(out.output.squeeze(2), out.state)


def hybrid_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: DecodingState,
    *,
    features: tuple[Tensor, Tensor] | None = None,
    gate: Tensor | None = None,
    units: Units = "row_max",
) -> tuple[Tensor, DecodingState]:
    """One token ``(B, heads, 1, .)`` of each sequence, all of them real, without gradients and in few operations.

    The state, made by :func:`linattn.ops.recurrent.decoding.begin`, is overwritten. Nothing is checked here: this is
    the inner loop of models, whose inputs are what they were at the step before.
    """
    (B, H), H_kv = q.shape[:2], k.shape[1]
    phi, psi = (q[..., :0], k[..., :0]) if features is None else features
    q, phi = (x.reshape(B * H_kv, H // H_kv, x.shape[3]) for x in (q, phi))
    token = StepToken(q, k, v, phi, psi)
    if gate is not None:
        gate = gate.reshape(B * H_kv, H // H_kv, v.shape[3]).to(state.sums.dtype)
    out, state = decoding_step(token, state, gate, units)
    return out.view(B, H, 1, v.shape[3]).to(v.dtype), state


def explain_hybrid(q: Tensor, k: Tensor, v: Tensor, *, impl: str = "auto", **options: Any) -> Choice:
    """Which implementation ``hybrid_attention(q, k, v, **options)`` takes, and why."""
    call = HybridCall(q, k, v, **options)
    call.check()
    return _choose(call, impl)


def _choose(call: HybridCall, impl: str) -> Choice:
    return choose(impl, call.q, lambda: kernels.against(call), one_token=call.is_step)


def _run(call: HybridCall, impl: str) -> HybridOutput:
    call.check()
    chosen = _choose(call, impl).impl
    if call.cu_seqlens is not None:
        return _packed(call, chosen)
    out_dtype = call.v.dtype if call.v.dtype == torch.float64 else autocast_dtype(call.q) or call.v.dtype
    with without_autocast(call.q):
        if chosen == "triton":
            found, state = kernels.attend(call, out_dtype)
            return HybridOutput(hide(found, call.key_mask), state)
        dtype = compute_dtype(call.q, call.k, call.v)
        if chosen == "recurrent" or call.k.shape[2] == 0:
            sums, state = _token_by_token(call, dtype)
        else:
            rows, places = build_rows(call, dtype)
            sums = FORMS[chosen](rows)
            sums = HybridSums(*(places.back(x[:, :, : places.real.shape[1]]) for x in sums))
            # Without need_state nobody reads it, and what does not exist costs nothing.
            state = final_state(call, rows, places) if call.need_state else None  # type: ignore[assignment]
        gate = None if call.gate is None else hide(call.gate, call.key_mask).to(dtype)
        output = _share(sums, gate, call.units, call.eps)
    return HybridOutput(hide(output, call.key_mask).to(out_dtype), state)


def _share(sums: HybridSums, gate: Tensor | None, units: Units, eps: float) -> Tensor:
    """Both parts over one denominator."""
    exact, exact_total, log_max, linear, linear_total = sums
    none_exact = log_max == -torch.inf
    if gate is not None:
        linear = linear * gate
    if units == "one":
        # In units of the larger part: e^{-unit} brings the linear one there, e^{log_max - unit} the exact one.
        unit = torch.maximum(log_max, linear_total.clamp(min=0).log()).detach()
        unit = torch.where(none_exact, 0.0, unit)
        own = torch.where(none_exact, 0.0, log_max - unit).exp()
        exact, exact_total = exact * own.unsqueeze(-1), exact_total * own
        other = (-unit).clamp(max=LARGEST_EXPONENT).exp()
        linear, linear_total = linear * other.unsqueeze(-1), linear_total * other
    total = exact_total + linear_total + torch.where(none_exact, eps, 0.0)
    # A row that sees nothing at all is 0, not 0 / 0, without eps too.
    return (exact + linear) / torch.where(none_exact & (total == 0), 1.0, total).unsqueeze(-1)


def _token_by_token(call: HybridCall, dtype: torch.dtype) -> tuple[HybridSums, HybridState]:
    state = empty_state(call, dtype) if call.initial_state is None else call.initial_state
    if call.chooses and state.salient is None:
        state = state._replace(salient=empty_cache(call, dtype))
    H_kv, (phi, psi), mask = call.k.shape[1], call.feature_pair, call.key_mask
    q, phi = (hide(x, mask).to(dtype).unflatten(1, (H_kv, -1)) for x in (call.q, phi))
    k, v, psi = (hide(x, mask).to(dtype) for x in (call.k, call.v, psi))
    q, named, scores = q * call.logit_scale, call.salient_mask(), call.scores
    if scores is not None:
        scores = (scores if mask is None else scores.masked_fill(~mask[:, None], 0)).detach().to(dtype)
    found = []
    for t in range(k.shape[2]):
        token = Token(
            q[:, :, :, t], k[:, :, t], v[:, :, t], phi[:, :, :, t], psi[:, :, t],
            None if scores is None else scores[:, :, t], named[:, :, t], None if mask is None else mask[:, t],
        )  # fmt: skip
        sums, state = hybrid_step(token, state, call.spans, call.budget)
        found.append(sums)
    if not found:
        totals = q.new_zeros(*call.q.shape[:3])
        values = q.new_zeros(*totals.shape, v.shape[3])
        return HybridSums(values, totals, totals, values, totals), state
    return HybridSums(*(torch.stack(x, 3).flatten(1, 2) for x in zip(*found, strict=True))), state


def _packed(call: HybridCall, impl: str) -> HybridOutput:
    """Packed sequences, one per row."""
    assert call.cu_seqlens is not None
    rows = packing(call.cu_seqlens, call.k.shape[2])
    q, k, v = (rows.unpack(x) for x in (call.q, call.k, call.v))
    phi, psi = (rows.unpack(x) for x in call.feature_pair)
    mask = rows.mask if call.key_mask is None else rows.mask & call.key_mask[0][rows.tokens]
    scores, gate = (None if x is None else rows.unpack(x) for x in (call.scores, call.gate))
    salient = None if call.salient is None else rows.unpack(call.salient_mask())
    call = replace(
        call,
        q=q,
        k=k,
        v=v,
        features=(phi, psi),
        salient=salient,
        scores=scores,
        gate=gate,
        key_mask=mask,
        cu_seqlens=None,
    )
    out = _run(call, impl)
    return HybridOutput(rows.pack(out.output), out.state)
