"""Bidirectional attention without decay on the GPU: every query sees every key, in linear time.

For short sequences one program per key head does everything. For long ones segments are summed in parallel.
"""

from typing import Any

import torch
from torch import Tensor

from linattn.kernels.bidirectional.library import attend
from linattn.kernels.bidirectional.maps import maps_of
from linattn.kernels.common.support import NORM_CODES
from linattn.ops.maps import Twin
from linattn.ops.shared.types import AttentionOutput, LinearState, Normalizer


def attend_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    maps: tuple[Twin, Twin] | None = None,
    normalizer: Normalizer,
    eps: float,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial: LinearState | None = None,
    out_dtype: torch.dtype,
    need_state: bool = False,
) -> AttentionOutput:
    """Bidirectional attention: ``o_t = phi_t S / n_t`` with ``S = initial + sum_s psi_s v_s^T``.

    q ``(B, H, Tq, K)``, k ``(B, H_kv, Tk, K)``, v ``(B, H_kv, Tk, V)`` of one dtype, with any strides; K and V up to
    256. Without ``maps`` q and k are features. With ``maps`` (see ``can_fuse``) q and k are raw inputs of width D that
    the kernels map when they read them; K is then parts D, and one more with a constant feature. With two flows the
    state is that of virtual heads, ``(N, 2 H_kv, K, V / 2)`` and ``(N, 2 H_kv, K)``. Masked keys and their values may
    hold anything. Returns the output ``(B, H, Tq, V)`` in ``out_dtype`` and in the memory order of q (see
    ``like_tokens``), and the state with all keys added, or None if it is not needed.
    """
    start = None
    if initial is not None:
        start = torch.cat([initial.kv.float().flatten(2), initial.k.float()], dim=-1)
    of_maps: tuple[Any, ...] = (None,) * 6 + (-1, -1, 1, 1)
    K, V = q.shape[3], v.shape[3]
    if maps is not None and not all(_changes_nothing(twin) for twin in maps):
        query, key, parts, flows = maps_of(maps)
        of_maps = (*query[1:], *key[1:], query.code, key.code, parts, flows)
        K, V = K * parts + int(key.constant is not None), V // flows
    output, state = attend(
        q, k, v, key_mask, cu_seqlens, start, NORM_CODES[normalizer], float(eps), out_dtype, need_state, *of_maps
    )
    found: Any = None  # a state that was not asked for
    if need_state:
        kv, z = state.split([K * V, K], dim=-1)
        found = LinearState(kv.unflatten(-1, (K, V)), z)
    return AttentionOutput(output, found)


def _changes_nothing(twin: Twin) -> bool:
    """Whether the map leaves inputs as they are: such inputs may be wider than those that kernels map."""
    return twin.name == "identity" and twin.flows == 1 and twin.token is None and twin.constant is None
