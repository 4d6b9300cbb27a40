"""``hybrid_attention``: exact softmax over a window and chosen tokens, linear attention over the rest, one denominator.

m_t = max of s_ti over exact i,     s_ti = scale q_t . k_i
o_t = (sum_exact e^{s_ti - m_t} v_i + g_t * sum_rest (phi_t . psi_i) v_i)
    / (sum_exact e^{s_ti - m_t}     +       sum_rest (phi_t . psi_i))
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from linattn.kernels.hybrid import attend as kernels
from linattn.ops.hybrid.call import HybridCall
from linattn.ops.hybrid.chunked import hybrid_sums as chunked
from linattn.ops.hybrid.recurrent import hybrid_sums as recurrent
from linattn.ops.hybrid.reference import hybrid_sums as reference
from linattn.ops.hybrid.rows import build_rows, final_state
from linattn.ops.hybrid.types import HybridOutput, HybridState, HybridSums, Layout, Rows, SalientBudget, Units
from linattn.ops.shared.call import chooser, compute_dtype, hide, one_token, output_dtype, without_autocast

FORMS: dict[str, Callable[[Rows], HybridSums]] = {"reference": reference, "chunked": chunked}
OF_TOKEN = ("features", "scores", "gate")  # options that are given for each token
LARGEST_EXPONENT = 80.0  # e^80 is finite in fp32; a unit below e^-80 means that both parts together are next to 0
checked_choice = chooser(kernels)


def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    features: tuple[Tensor, Tensor] | None = None,
    window: int = 64,
    layout: Layout = "sliding",
    delay: int = 1,
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
    """Causal attention with an exact softmax over a window and chosen tokens, and linear attention over the rest.

    Every token up to the query is either exact or linear, and both parts share one denominator:

    ``o_t = (sum_exact e^{s_ti - m_t} v_i + g_t * sum_linear w_ti v_i) / (sum_exact e^{s_ti - m_t} + sum_linear w_ti)``

    with ``s_ti = scale q_t . k_i``, ``m_t`` the largest ``s_ti`` of an exact token and ``w_ti = phi_t . psi_i``. The
    exact weights are at most 1, so nothing overflows, and one of them is 1, so nothing is divided by 0. A row without
    exact keys is linear attention, with ``eps`` added to its denominator; a row without linear keys is softmax
    attention. Gradients are exact and include that of ``m_t``; the choice of tokens has none.

    Args:
        q, k, v, key_mask, cu_seqlens, impl, validate: as in :func:`linear_attention`. Packed sequences are unpacked to
            rows as long as the longest; to know that length the host waits for the GPU.
        features: ``phi (B, H, T, F)`` of the queries and ``psi (B, H_kv, T, F)`` of the keys, not negative. A factor on
            phi weighs the linear part. None: there is no linear part, and tokens that are not exact are not seen.
        window: number of latest tokens that are exact, or the size of a chunk, see layout. 0: none.
        layout: ``"sliding"``: the window ends at each query. ``"chunks"``: a query sees its own chunk up to itself and
            ``delay`` whole chunks before. Chunks are counted from the first real token of a sequence.
        delay: see layout; STILL and LoLCATs have 1.
        budget: keep some older tokens exact, the best of each chunk by their scores. With ``layout="chunks"`` a choice
            takes effect when the window lets go of the chunk, so no query depends on later tokens through it.
        scores: ``(B, H_kv, T)``, without gradients; tokens with higher scores are kept. None: how much a token attends
            to itself among the last ``budget.chunk`` tokens, measured by ``budget.score`` and ``budget.reduce``; see
            :func:`linattn.ops.hybrid.saliency.self_saliency`.
        gate: ``g (B, H, T, V)``, a factor on the numerator of the linear part; None: 1.
        scale: factor on q in the exact part; None: ``K**-0.5``.
        units: what a linear weight is compared to. ``"row_max"``: it counts like ``e^{s - m_t}``, relative to the
            strongest exact key, whatever that is, as in LoLCATs and STILL. ``"one"``: it counts like ``e^s``, so that a
            strong exact key outweighs the rest; for features that approximate the exponential itself.
        eps: added to the denominators of rows without exact keys.

    Returns:
        ``(B, H, T, V)`` in the dtype of v (under autocast, in the dtype of autocast); 0 at masked tokens.

    Example:
        A window in chunks of 16, 1 of 8 older tokens kept exact, and a linear part for the others:

        >>> import torch
        >>> from linattn.ops.hybrid.api import hybrid_attention
        >>> from linattn.ops.hybrid.types import SalientBudget
        >>> q, k, v = torch.randn(3, 1, 4, 256, 32).unbind()
        >>> features = q.softmax(-1), k.softmax(-1)
        >>> budget = SalientBudget(ratio=1 / 8, chunk=16)
        >>> hybrid_attention(q, k, v, features=features, window=16, layout="chunks", budget=budget).shape
        torch.Size([1, 4, 256, 32])
    """
    call = HybridCall(
        q, k, v, features, window, layout, delay, budget, scores, gate, scale, units, eps, key_mask, cu_seqlens,
        validate,
    )  # fmt: skip
    return _run(call, impl).output


def hybrid_attention_with_state(
    q: Tensor, k: Tensor, v: Tensor, *, initial_state: HybridState | None = None, impl: str = "auto", **options: Any
) -> HybridOutput:
    """:func:`hybrid_attention` that starts from a state and also returns the state after the last token.

    ``options`` are those of :func:`hybrid_attention`. A sequence may be cut anywhere; if the state is handed over, the
    pieces give what the whole sequence gives. The options of the window and the budget must be the same in every call.
    With ``cu_seqlens`` the state has one row per sequence.

    Example:
        >>> import torch
        >>> from linattn.ops.hybrid.api import hybrid_attention_with_state
        >>> q, k, v = torch.randn(3, 1, 2, 10, 4).unbind()
        >>> output, state = hybrid_attention_with_state(q, k, v, features=(q.exp(), k.exp()), window=3)
        >>> output.shape, state.length.tolist(), state.window.k.shape, state.linear.kv.shape
        (torch.Size([1, 2, 10, 4]), [10], torch.Size([1, 2, 3, 4]), torch.Size([1, 2, 4, 4]))
    """
    return _run(HybridCall(q, k, v, initial_state=initial_state, need_state=True, **options), impl)


def hybrid_attention_step(
    q_t: Tensor, k_t: Tensor, v_t: Tensor, state: HybridState | None, **options: Any
) -> HybridOutput:
    """One decoding step of :func:`hybrid_attention`: attend with one token and return the next state.

    ``q_t (B, H, K)``, ``k_t (B, H_kv, K)`` and ``v_t (B, H_kv, V)`` are the token's, and so are ``features``,
    ``scores (B, H_kv)`` and ``gate (B, H, V)``; the other options are those of the whole sequence. A state of None is
    empty. Returns the output ``(B, H, V)`` and the next state. Time and memory of a step are constant and the host does
    not wait for a GPU, unless tokens are chosen without ``budget.cap``: then the cache grows, and the host waits for
    the GPU to know whether it is full.

    Example:
        >>> import torch
        >>> from linattn.ops.hybrid.api import hybrid_attention_step
        >>> state = None
        >>> for q, k, v in torch.randn(5, 3, 1, 2, 4):
        ...     output, state = hybrid_attention_step(q, k, v, state, features=(q.exp(), k.exp()), window=3)
        >>> output.shape, state.length.tolist()
        (torch.Size([1, 2, 4]), [5])
    """
    call = one_token(HybridCall, (q_t, k_t, v_t), state, options, OF_TOKEN)
    output, state = _run(call, "auto")
    return HybridOutput(output.squeeze(2), state)


def _run(call: HybridCall, impl: str) -> HybridOutput:
    chosen, out_dtype = checked_choice(call, impl).impl, output_dtype(call.v)
    if call.cu_seqlens is not None:
        return _packed(call, chosen)
    with without_autocast(call.q):
        if chosen == "triton":
            output, state = kernels.attend(call, out_dtype)
            return HybridOutput(hide(output, call.key_mask), state)
        dtype = compute_dtype(call.q, call.k, call.v)
        if chosen == "recurrent" or call.k.shape[2] == 0:
            sums, state = recurrent(call, dtype)
        else:
            rows, places = build_rows(call, dtype)
            sums = FORMS[chosen](rows)
            sums = HybridSums(*(places.back(x[:, :, : places.real.shape[1]]) for x in sums))
            # Without need_state nobody reads the state, so it is not made.
            state = final_state(call, rows, places) if call.need_state else None  # type: ignore[assignment]
        gate = None if call.gate is None else hide(call.gate, call.key_mask).to(dtype)
        output = _share(sums, gate, call.units, call.eps)
    return HybridOutput(hide(output, call.key_mask).to(out_dtype), state)


def _share(sums: HybridSums, gate: Tensor | None, units: Units, eps: float) -> Tensor:
    """The output: both parts over one denominator."""
    exact, exact_total, log_max, linear, linear_total = sums
    none_exact = log_max == -torch.inf
    if gate is not None:
        linear = linear * gate
    if units == "one":
        # In units of the larger part: the linear part is multiplied by e^{-unit}, the exact one by e^{log_max - unit}.
        unit = torch.maximum(log_max, linear_total.clamp(min=0).log()).detach()
        unit = torch.where(none_exact, 0.0, unit)
        shrink = torch.where(none_exact, 0.0, log_max - unit).exp()
        exact, exact_total = exact * shrink.unsqueeze(-1), exact_total * shrink
        other = (-unit).clamp(max=LARGEST_EXPONENT).exp()
        linear, linear_total = linear * other.unsqueeze(-1), linear_total * other
    total = exact_total + linear_total + torch.where(none_exact, eps, 0.0)
    # A row that sees nothing at all is 0 and not 0 / 0, even with eps = 0.
    return (exact + linear) / torch.where(none_exact & (total == 0), 1.0, total).unsqueeze(-1)


def _packed(call: HybridCall, impl: str) -> HybridOutput:
    """Run packed sequences unpacked, one per row, as long as the longest: to know it, the host waits for a GPU."""
    assert call.cu_seqlens is not None
    bounds = call.cu_seqlens.long()
    lengths = bounds.diff()
    slots = torch.arange(int(lengths.max()), device=bounds.device)
    real = slots < lengths[:, None]  # (N, L)
    tokens = (bounds[:-1, None] + slots).clamp(max=max(call.k.shape[2] - 1, 0))

    def unpack(x: Any) -> Any:
        """``(1, H, T, ...)`` to ``(N, H, L, ...)``."""
        if isinstance(x, tuple):
            return tuple(map(unpack, x))
        return None if x is None else x[0][:, tokens].transpose(0, 1)

    of_tokens = {name: unpack(getattr(call, name)) for name in ("q", "k", "v", *OF_TOKEN)}
    mask = real if call.key_mask is None else real & call.key_mask[0][tokens]
    output, state = _run(replace(call, **of_tokens, key_mask=mask, cu_seqlens=None), impl)
    return HybridOutput(output.transpose(1, 2)[real].transpose(0, 1).unsqueeze(0), state)
