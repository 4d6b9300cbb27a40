"""Causal linear attention, and bidirectional attention with a decay, on Triton kernels.

A sequence is walked chunk by chunk with its state in registers. A long one with few heads is cut into segments, whose
states are made first and summed in order. The backward pass walks again; only the normaliser's row sums are kept.
"""

import torch
from torch import Tensor

from linattn.kernels.causal.library import causal_directly
from linattn.kernels.causal.widths import first_of, missing_of_both, padded_by
from linattn.kernels.common.support import NORM_CODES
from linattn.ops.shared.types import AttentionOutput, DecayIndex, LinearState, Normalizer

WIDEST = 256


def attend_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    decay_index: DecayIndex,
    normalizer: Normalizer,
    eps: float,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial: LinearState | None = None,
    out_dtype: torch.dtype,
    need_state: bool = False,
    log_input: Tensor | None = None,
    tf32: bool = False,
) -> AttentionOutput:
    """Causal attention ``o_t = sum_{s<=t} M_ts (q_t . k_s) v_s / n_t``; the state is None unless needed.

    q ``(B, H, T, K)``, k ``(B, H_kv, T, K)`` and v ``(B, H_kv, T, V)`` of one dtype, K and V at most 256.
    log_decay is None, ``(H_kv,)`` or ``(B, H_kv, T)``; log_input, whose exponentials are weights of the keys, is None
    or ``(B, H_kv, T)``; both are zero at masked tokens. tf32: whether fp32 inputs multiply in tf32.
    """
    _check_widths(q, v)
    K, V, tf32 = q.shape[3], v.shape[3], tf32 and q.dtype == torch.float32
    more_k, more_v = missing_of_both(q, k, v, tf32)
    kv = z = None
    if initial is not None:
        kv, z = padded_by(initial.kv.float(), more_v, more_k), padded_by(initial.k.float(), more_k)
    a, i = _gates(k, log_decay, log_input)
    out, _, kv, z = causal_directly(
        padded_by(q, more_k), padded_by(k, more_k), padded_by(v, more_v), kv, z, a, key_mask, cu_seqlens,
        decay_index == "key", NORM_CODES[normalizer], eps, out_dtype, need_state, False, i, tf32,
    )  # fmt: skip
    state = LinearState(first_of(first_of(kv, 2, K), 3, V), first_of(z, 2, K)) if need_state else None
    return AttentionOutput(first_of(out, 3, V), state)  # type: ignore[arg-type]


def attend_both_ways(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    decay_index: DecayIndex,
    normalizer: Normalizer,
    eps: float,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    out_dtype: torch.dtype,
    log_input: Tensor | None = None,
) -> Tensor:
    """Bidirectional attention whose weights decay with distance (LION): a causal sweep and a strict one backwards."""
    _check_widths(q, v)
    V, (more_k, more_v) = v.shape[3], missing_of_both(q, k, v)
    q, k, v = padded_by(q, more_k), padded_by(k, more_k), padded_by(v, more_v)
    a, i = _gates(k, log_decay, log_input)
    out = causal_directly(
        q, k, v, None, None, a, key_mask, cu_seqlens, decay_index == "key", NORM_CODES[normalizer], eps,
        out_dtype, False, True, i, False,
    )[0]  # fmt: skip
    return first_of(out, 3, V)


def _gates(k: Tensor, log_decay: Tensor | None, log_input: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gates in fp32. Kernels take weights of keys only beside a decay, so without a decay one of 1 is made."""
    if log_decay is None and log_input is not None:
        log_decay = torch.zeros(k.shape[1], device=k.device)
    return None if log_decay is None else log_decay.float(), None if log_input is None else log_input.float()


def _check_widths(q: Tensor, v: Tensor) -> None:
    for name, width in (("q and k", q.shape[3]), ("v", v.shape[3])):
        if not 1 <= width <= WIDEST:
            raise ValueError(f"{name} must have 1 to {WIDEST} features a head for the Triton kernels, got {width}")
