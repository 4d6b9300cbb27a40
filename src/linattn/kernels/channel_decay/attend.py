"""Causal attention with a decay per key channel (gated linear attention), by Triton kernels.

    S_t = lambda_t * S_{t-1} + k_t v_t,     o_t = q_t S_t / n_t         (lambda_t by rows of S)

The forward pass is one walk, the backward pass three. Besides the results nothing of the size of the inputs, of a score
matrix or of a state per chunk is stored.
"""

import torch
from torch import Tensor

from linattn.kernels.causal.widths import first_of, missing, padded_by
from linattn.kernels.channel_decay.library import channel_decay_directly
from linattn.kernels.common.support import NORM_CODES
from linattn.ops.shared.types import AttentionOutput, DecayIndex, LinearState, Normalizer


def attend_channel_decay(
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
    initial: LinearState | None = None,
    out_dtype: torch.dtype,
    need_state: bool = False,
) -> AttentionOutput:
    """Causal linear attention with ``log_decay (B, H_kv, T, K) <= 0``, which may be -inf and is not read where masked.

    q ``(B, H, T, K)``, k ``(B, H_kv, T, K)`` and v ``(B, H_kv, T, V)`` have any strides and one dtype: fp32, bf16 or
    fp16. The state is fp32, with one row per sequence; without ``need_state`` it is None.
    """
    shift = decay_index == "key"
    K, V = q.shape[3], v.shape[3]
    more_k, more_v = missing(K, q.dtype), missing(V, q.dtype)
    kv_0 = z_0 = None
    if initial is not None:
        kv_0, z_0 = padded_by(_fp32(initial.kv), more_v, more_k), padded_by(_fp32(initial.k), more_k)
    q, k, v, log_decay = (
        padded_by(x, more) for x, more in ((q, more_k), (k, more_k), (v, more_v), (log_decay, more_k))
    )
    out, _, kv, z = channel_decay_directly(
        q, k, v, log_decay, kv_0, z_0, key_mask, cu_seqlens, NORM_CODES[normalizer], eps, shift, need_state,
        out_dtype,
    )  # fmt: skip
    out = first_of(out, 3, V)
    if not need_state:
        return AttentionOutput(out, None)  # type: ignore[arg-type]
    if shift and log_decay.shape[2]:
        last = _last_decay(log_decay, key_mask, cu_seqlens).exp()
        kv, z = kv * last.unsqueeze(-1), z * last
    return AttentionOutput(out, LinearState(first_of(first_of(kv, 2, K), 3, V), first_of(z, 2, K)))


def _fp32(state: Tensor) -> Tensor:
    return state.float().contiguous()


def _last_decay(log_decay: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The decay of each sequence's last token, ``(N, H_kv, K)``; 0 if there is none or it is masked."""
    if cu_seqlens is None:
        last = log_decay[:, :, -1].float()
        return last if key_mask is None else last.masked_fill(~key_mask[:, -1, None, None], 0)
    at = (cu_seqlens[1:] - 1).clamp(min=0)
    last = log_decay[0].index_select(1, at).transpose(0, 1).float()
    none = cu_seqlens.diff() == 0
    if key_mask is not None:
        none = none | ~key_mask[0].index_select(0, at)
    return last.masked_fill(none[:, None, None], 0)
