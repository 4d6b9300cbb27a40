"""Hybrid attention by kernels: rows in the dtype of the inputs, and everything including the division in one pass.

The sums of the linear part are stored for every chunk (fp32). Gradients have their own kernels and are exact except for
ties: if several strongest keys are equally strong, the gradient of the row maximum goes to one of them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from linattn.kernels.causal.widths import first_of, missing, padded_by
from linattn.kernels.common.operands import one_dtype
from linattn.kernels.common.support import reason_against
from linattn.kernels.hybrid.config import NARROWEST, pick
from linattn.kernels.hybrid.library import hybrid_directly
from linattn.kernels.hybrid.token_list import listed
from linattn.ops.hybrid.call import HybridCall
from linattn.ops.hybrid.rows import build_rows, final_state, whole_chunks
from linattn.ops.hybrid.types import HybridOutput, Rows
from linattn.ops.shared.call import compute_dtype, hide

WIDEST, MOST_FEATURES = 128, 256


def against(call: HybridCall) -> str:
    """Why no kernel serves the call, in words; empty if one does."""
    phi, psi = call.feature_pair
    for what, width, most in (
        ("numbers a head of q and k", call.q.shape[3], WIDEST),
        ("numbers a head of v", call.v.shape[3], WIDEST),
        ("features a head", phi.shape[3], MOST_FEATURES),
    ):
        if width > most:
            return f"they take up to {most} {what}, got {width}"
    if not min(*call.q.shape, call.v.shape[3]):
        return "an empty input needs none"
    if call.is_step:
        return "they serve training and prefill, not single tokens"
    if chunk_of(call) % NARROWEST:
        return f"they take chunks of a multiple of {NARROWEST} tokens, got {chunk_of(call)}"
    return reason_against(call.q, call.k, call.v, phi, psi)


def chunk_of(call: HybridCall) -> int:
    """Tokens of a chunk: as in the window or the budget, or one tile if neither has chunks."""
    if (call.layout == "chunks" and call.window) or call.budget is not None:
        return call.chunk
    return pick(64, 64, 64, 64, call.q.dtype).L


def attend(call: HybridCall, out_dtype: torch.dtype) -> HybridOutput:
    """Output ``(B, H, T, V)``, and the state if it is needed."""
    phi, psi = call.feature_pair
    q, k, v, phi, psi, *gate = one_dtype(call.q, call.k, call.v, phi, psi, *([] if call.gate is None else [call.gate]))
    call = replace(call, q=q, k=k, v=v, features=None if call.features is None else (phi, psi))
    rows, places = build_rows(call, compute_dtype(q, k, v), operands=q.dtype, chunk=chunk_of(call))
    gates = whole_chunks(places.gather(hide(gate[0], call.key_mask)), rows.chunk) if gate else None
    size = places.real.shape[1]
    out = _output(call, rows, gates, out_dtype)[:, :, :size]
    state = final_state(call, _wide(rows), places) if call.need_state else None
    return HybridOutput(places.back(out), state)  # type: ignore[arg-type]


def _output(call: HybridCall, rows: Rows, gate: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    dtype, V, Fs = rows.q.dtype, rows.v.shape[3], rows.key_features.shape[3]
    back = rows.window.chunks_before(rows.chunk)
    tiles = pick(rows.chunk, rows.k.shape[3], V, Fs, dtype)
    found, chosen = listed(rows, back, tiles.BN), rows.salient
    more_k, more_v, more_f = (missing(width, dtype) for width in (rows.k.shape[3], V, Fs))
    phi = psi = kv = z = None
    if Fs:
        phi, psi = padded_by(rows.query_features, more_f), padded_by(rows.key_features, more_f)
        if call.initial_state is not None:
            kv, z = padded_by(rows.initial.kv, more_v, more_f), padded_by(rows.initial.k, more_f)
    old_k = old_v = old_psi = None
    if found is not None and chosen is not None and chosen.head:
        old_k, old_v = (padded_by(x[:, :, : chosen.head], m) for x, m in ((chosen.k, more_k), (chosen.v, more_v)))
        if Fs and found.joining is not None:
            old_psi = padded_by(chosen.features[:, :, : chosen.head], more_f)
    of_logits = (rows.q, rows.k) if old_k is None else (rows.q, rows.k, old_k)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in of_logits)
    out = hybrid_directly(
        padded_by(rows.q, more_k), padded_by(rows.k, more_k), padded_by(rows.v, more_v), phi, psi,
        None if gate is None else padded_by(gate, more_v), kv, z, old_k, old_v, old_psi, *(found or (None,) * 7),
        rows.real.to(torch.uint8).argmax(1).int(), rows.chunk, back, rows.window.size,
        rows.window.layout == "sliding" or rows.window.size == 0, float(call.logit_scale), float(call.eps),
        call.units == "one", learns and bool(Fs) and call.units == "row_max", out_dtype,
    )[0]  # fmt: skip
    return first_of(out, 3, V)


def _wide(rows: Rows) -> Rows:
    """The rows with keys, values and features in fp32, for the sums of a state."""
    wide = {name: getattr(rows, name).float() for name in ("k", "v", "key_features")}
    chosen = rows.salient
    if chosen is not None:
        chosen = replace(chosen, **{name: getattr(chosen, name).float() for name in ("k", "v", "features")})
    return replace(rows, salient=chosen, **wide)
