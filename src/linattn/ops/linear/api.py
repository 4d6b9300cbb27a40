"""``linear_attention``: the function that most mechanisms of this library are built on.

    o_t = sum_s M_ts (phi_t . psi_s) v_s / n_t

with features ``phi = map(q)``, ``psi = map(k)``, a mask or decay M and a normaliser n.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from linattn.kernels import linear as kernels
from linattn.ops.linear.call import (
    FeatureMaps,
    LinearCall,
    join_outputs,
    log_decay_for,
    log_input_for,
    map_features,
    normalize,
    rotated,
    split_decay,
    split_values,
    weigh,
)
from linattn.ops.linear.chunked import linear_sums as chunked
from linattn.ops.linear.recurrent import linear_sums as recurrent
from linattn.ops.linear.reference import linear_sums as reference
from linattn.ops.shared.call import (
    chooser,
    compute_dtype,
    hide,
    one_token,
    output_dtype,
    without_autocast,
    zero_state,
)
from linattn.ops.shared.rotation import Rotate
from linattn.ops.shared.types import AttentionOutput, DecayIndex, LinearState, Normalizer, Pattern, Sums

Form = Callable[[Tensor, Tensor, Tensor, Pattern, LinearState], Sums]

FORMS: dict[str, Form] = {"reference": reference, "recurrent": recurrent, "chunked": chunked}
OF_TOKEN = ("log_decay", "log_input", "norm_features")  # options that a step has for its token
checked_choice = chooser(kernels, own_gradients=True)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    log_decay: Tensor | None = None,
    log_input: Tensor | None = None,
    normalizer: Normalizer = "sum",
    eps: float = 1e-6,
    feature_map: FeatureMaps = None,
    norm_features: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    decay_index: DecayIndex | None = None,
    rotate: Rotate | None = None,
    impl: str = "auto",
    validate: bool | None = None,
) -> Tensor:
    """Linear attention with the shapes of ``scaled_dot_product_attention``.

    ``o_t = sum_s M_ts (phi_t . psi_s) v_s / n_t``

    with features ``phi`` of q and ``psi`` of k, a mask or decay M and a normaliser n.

    Args:
        q: queries ``(B, H, Tq, K)``.
        k: keys ``(B, H_kv, Tk, K)``. ``H_kv`` must divide ``H``; the ``H/H_kv`` query heads from ``g H/H_kv`` on share
            key head g.
        v: values ``(B, H_kv, Tk, V)``.
        causal: if True, a token sees itself and the past (needs Tq = Tk); otherwise it sees every key.
        log_decay: ``log lambda <= 0`` per head ``(H_kv,)``, token ``(B, H_kv, T)`` or channel
            ``(B, H_kv, T, K)``. A pair's weight is the product of the decays between its tokens, also when the
            attention is bidirectional (LION).
        log_input: logarithm of a weight per key, ``(B, H_kv, Tk)`` (an input gate): psi_s counts ``exp(log_input_s)``
            times in the numerator, the denominator and the state.
        normalizer: ``"sum"``: n = the row sum + eps; ``"abs_max_one"``: n = max(abs(row sum), 1); None: n = 1.
        eps: added to the row sum. Vision papers add 1e-6 to the row *mean*: for that, pass 1e-6 times the number of
            keys.
        feature_map: a map applied to q and k, or a pair of maps, one for each. None (the default) takes q and k
            themselves as the features; with ``normalizer="sum"`` they should then be non-negative. A map with two flows
            turns each head into two virtual heads: the first attends to the first half of v's channels, the second to
            the other half.
        norm_features: features ``(q', k')``, shaped like q and k, that the denominator uses instead, without mapping
            them (for example to have rotary positions in the numerator only).
        key_mask: ``(B, Tk)`` bool, True = real token. A masked token adds nothing to the numerator or the
            denominator and does not decay the state.
        cu_seqlens: ``(N+1,)`` offsets of N sequences packed into one row (B = 1); no sequence sees another.
        decay_index: which end of a pair has its decay included in the pair's product: the ``"query"`` token
            (``S_t = lambda_t S_{t-1} + k_t v_t``, as in GLA, RetNet, mLSTM; the default when causal) or the
            ``"key"`` token (as in LION's code; the default when bidirectional).
        rotate: a function ``(phi, psi) -> (phi', psi')`` that turns the features in the numerator. The denominator
            uses the features before the turn, or ``norm_features`` if these are given.
        impl: ``"auto"``, ``"reference"``, ``"recurrent"``, ``"chunked"`` or ``"triton"``; see :func:`explain`.
        validate: whether to check values too (sorted offsets, log_decay <= 0), which costs a sync on a GPU. None: only
            on the CPU.

    Returns:
        ``(B, H, Tq, V)`` in the dtype of v (under autocast, in the dtype of autocast).

    Example:
        A drop-in for softmax attention, in linear time:

        >>> import torch
        >>> from linattn import linear_attention
        >>> from linattn.ops.maps import EluPlusOne
        >>> q, k, v = torch.randn(3, 1, 8, 1024, 64).unbind()
        >>> linear_attention(q, k, v, causal=True, feature_map=EluPlusOne()).shape
        torch.Size([1, 8, 1024, 64])
    """
    call = LinearCall(q, k, v, causal, log_decay, normalizer, eps, feature_map, norm_features, key_mask,
                      cu_seqlens, decay_index, validate, log_input=log_input, rotate=rotate)  # fmt: skip
    return run(call, impl).output


def linear_attention_with_state(
    q: Tensor, k: Tensor, v: Tensor, *, initial_state: LinearState | None = None, impl: str = "auto", **options: Any
) -> AttentionOutput:
    """:func:`linear_attention` that starts from a state and also returns the state after the last token.

    ``options`` are those of :func:`linear_attention` but ``rotate``, which counts positions from the first token.
    Causal: a sequence may be cut anywhere; if the state is handed over, the pieces give what the whole sequence gives.
    Bidirectional: the state is the sum over all keys so far. A bidirectional decay has no state and is refused.
    With ``cu_seqlens`` the state has one row per sequence.

    Example:
        >>> import torch
        >>> from linattn import linear_attention, linear_attention_with_state
        >>> q, k, v = torch.rand(3, 1, 2, 10, 4).unbind()
        >>> start, state = linear_attention_with_state(q[:, :, :6], k[:, :, :6], v[:, :, :6], causal=True)
        >>> end, state = linear_attention_with_state(
        ...     q[:, :, 6:], k[:, :, 6:], v[:, :, 6:], causal=True, initial_state=state
        ... )
        >>> torch.allclose(torch.cat([start, end], dim=2), linear_attention(q, k, v, causal=True), atol=1e-5)
        True
    """
    return run(LinearCall(q, k, v, initial_state=initial_state, need_state=True, **options), impl)


def linear_attention_step(
    q_t: Tensor, k_t: Tensor, v_t: Tensor, state: LinearState | None, **options: Any
) -> AttentionOutput:
    """One decoding step of causal :func:`linear_attention`: attend with one token and return the next state.

    ``q_t (B, H, K)``, ``k_t (B, H_kv, K)`` and ``v_t (B, H_kv, V)`` are the token's. A state of None is empty. Of the
    options of :func:`linear_attention` ``log_decay``, ``(H_kv,)``, ``(B, H_kv)`` or ``(B, H_kv, K)``, ``log_input
    (B, H_kv)`` and ``norm_features`` are the token's; ``normalizer``, ``eps``, ``feature_map``, ``decay_index`` and
    ``validate`` are as there. Returns the output ``(B, H, V)`` and the next state.

    Example:
        >>> import torch
        >>> from linattn import linear_attention, linear_attention_step
        >>> q, k, v = torch.rand(3, 1, 2, 10, 4).unbind()
        >>> state = None
        >>> for t in range(10):
        ...     output, state = linear_attention_step(q[:, :, t], k[:, :, t], v[:, :, t], state)
        >>> torch.allclose(output, linear_attention(q, k, v, causal=True)[:, :, -1], atol=1e-5)
        True
    """
    call = one_token(LinearCall, (q_t, k_t, v_t), state, {"causal": True, **options}, OF_TOKEN)
    output, state = run(call, "auto")
    return AttentionOutput(output.squeeze(2), state)


def run(call: LinearCall, impl: str) -> AttentionOutput:
    """Run a call, for use inside the library: a ``LinearCall`` has more options than the functions above."""
    chosen = checked_choice(call, impl).impl
    q, v, mask, flows = call.q, call.v, call.key_mask, call.flows
    dtype, out_dtype = compute_dtype(q, call.k, v), output_dtype(v)
    with without_autocast(q):
        # Wipe padding before the map too: it may be NaN, and a gradient of 0 through a NaN would be NaN.
        k, initial = hide(call.k, mask), call.initial_state
        if initial is not None:
            initial = LinearState(initial.kv.to(dtype), initial.k.to(dtype))
        if chosen == "triton":
            return kernels.attend(q, k, v, initial, call, out_dtype)
        phi, psi, norm_features = rotated(*map_features(q, k, call.feature_map), call)
        log_input = split_decay(log_input_for(call.log_input, mask), flows)
        psi, v = weigh(hide(psi, mask), log_input), split_values(hide(v, mask), flows)
        index = call.decay_index or ("query" if call.causal else "key")
        decay = split_decay(log_decay_for(call.log_decay, mask), flows)
        pattern = Pattern(call.causal, decay, index, call.cu_seqlens)
        if norm_features is not None:
            norm_features = norm_features[0], weigh(hide(norm_features[1], mask), log_input)
        sums = _sums(FORMS[chosen], phi, psi, v, norm_features, pattern, initial)
        output = normalize(sums.numerator, sums.denominator, call.normalizer, call.eps).to(out_dtype)
    return AttentionOutput(join_outputs(output, flows, k.shape[1]), sums.state)


def _sums(
    form: Form, phi: Tensor, psi: Tensor, v: Tensor, norm_features: tuple[Tensor, Tensor] | None, pattern: Pattern,
    initial: LinearState | None,
) -> Sums:  # fmt: skip
    """The sums of a form. A denominator of its own is a second linear attention, with values of width 0."""
    cu, nothing = pattern.cu_seqlens, v[..., :0]
    if norm_features is None:
        return form(phi, psi, v, pattern, zero_state(psi, v, cu) if initial is None else initial)
    kv, k = (zero_state(psi, v, cu).kv, zero_state(norm_features[1], nothing, cu).k) if initial is None else initial
    values = form(phi, psi, v, pattern, LinearState(kv, kv.new_zeros(kv.shape[:3])))
    norms = form(*norm_features, nothing, pattern, LinearState(kv.new_zeros(*k.shape, 0), k))
    return Sums(values.numerator, norms.denominator, LinearState(values.state.kv, norms.state.k))
