"""Bidirectional attention without decay on the GPU: every query sees every key, in linear time.

Short sequences: one program per key head does everything. Long ones: segments of the sequence are summed in parallel.
"""

from typing import Any

import torch
from torch import Tensor

from linattn.ops.triton.bidirectional_library import bidirectional
from linattn.ops.triton.support import NORM_CODES
from linattn.ops.types import AttentionOutput, LinearState, Normalizer


def attend_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    normalizer: Normalizer,
    eps: float,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial: LinearState | None = None,
    out_dtype: torch.dtype,
    need_state: bool = False,
) -> AttentionOutput:
    """``o_t = phi_t S / n_t`` with ``S = initial + sum_s psi_s v_s^T``; q and k are features already mapped.

    q ``(B, H, Tq, K)``, k ``(B, H_kv, Tk, K)``, v ``(B, H_kv, Tk, V)`` of one dtype, with any strides; K and V up to
    256. Masked keys and their values may hold anything. Returns the output ``(B, H, Tq, V)`` in ``out_dtype``,
    contiguous, and the state with all keys added, or None if it is not needed.
    """
    start = None
    if initial is not None:
        start = torch.cat([initial.kv.float().flatten(2), initial.k.float()], dim=-1)
    output, state = bidirectional(
        q, k, v, key_mask, cu_seqlens, start, NORM_CODES[normalizer], float(eps), out_dtype, need_state
    )
    found: Any = None  # a state that was not asked for
    if need_state:
        K, V = q.shape[3], v.shape[3]
        kv, z = state.split([K * V, K], dim=-1)
        found = LinearState(kv.unflatten(-1, (K, V)), z)
    return AttentionOutput(output, found)
