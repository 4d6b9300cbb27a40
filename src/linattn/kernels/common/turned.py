"""Bidirectional attention with turned features: two kernels for maps, turns and row sums, and one attention.

    o_t = sum_s (R_t phi_t . R_s psi_s) v_s / (phi_t . z + eps),  z = sum_s psi_s

The denominator's features are not turned and never stored: keys give z, and queries are divided by their row sum.
"""

from typing import Any

import torch
from torch import Tensor

from linattn.kernels.bidirectional.attend import attend_all
from linattn.kernels.common import which_kernel
from linattn.kernels.common.operands import one_dtype
from linattn.kernels.common.support import MAP_CODES
from linattn.kernels.maps.turned_library import turn_directly
from linattn.ops.linear.call import LinearCall, join_outputs, split_values
from linattn.ops.maps import FeatureMap, Twin
from linattn.ops.shared.call import check_size
from linattn.ops.shared.rotation import Rotation, Turns
from linattn.ops.shared.types import AttentionOutput


def twins_to_turn(call: LinearCall) -> tuple[Twin, Twin] | None:
    """The twins with which these kernels run the maps of a call with a rotation; None if they do not serve it."""
    summed = call.normalizer == "sum" and call.norm_features is None and call.log_input is None
    whole = call.cu_seqlens is None and call.initial_state is None and not call.need_state
    # A query divided by its row sum may be as small as 1 / T, below the range of fp16.
    ranged = torch.float16 not in (call.q.dtype, call.k.dtype)
    if which_kernel.kernel_of(call) != which_kernel.BIDIRECTIONAL or not (summed and whole and ranged):
        return None
    # Both channels of a pair must belong to the same part.
    D = call.q.shape[3]
    if not isinstance(call.rotate, Rotation) or D % 2 or call.k.shape[3] != D:
        return None
    query, key = (_twin(feature_map) for feature_map in call.maps)
    if query is None or key is None or query.constant is not None or key.constant is not None:
        return None
    return query, key


def attend_turned(
    q: Tensor, k: Tensor, v: Tensor, twins: tuple[Twin, Twin], call: LinearCall, out_dtype: torch.dtype
) -> AttentionOutput:
    """The output ``(B, H, Tq, V)``, in the memory order of q, and no state; q and k are not mapped yet."""
    assert isinstance(call.rotate, Rotation)
    of_queries = call.rotate.of_queries(call.num_features(0), q)
    of_keys = call.rotate.of_keys(call.num_features(1), k)
    for name, x, turns in (("q", q, of_queries), ("k", k, of_keys)):
        check_size(name, "length", x.shape[2], turns.cos.shape[0], "rotate")
    psi, z = _turned(k, None, call.key_mask, of_keys, twins[1], 0.0, 1)
    phi, _ = _turned(q, z, None, of_queries, twins[0], float(call.eps), q.shape[1] // k.shape[1])
    output = attend_all(
        *one_dtype(phi, psi, split_values(v, call.flows)), normalizer=None, eps=0.0, key_mask=call.key_mask,
        out_dtype=out_dtype,
    ).output  # fmt: skip
    nothing: Any = None  # no state
    return AttentionOutput(join_outputs(output, call.flows, k.shape[1]), nothing)


def _turned(
    x: Tensor, z: Tensor | None, key_mask: Tensor | None, turns: Turns, twin: Twin, eps: float, group: int
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = turn_directly(
        x, z, key_mask, turns.cos, turns.sin, twin.table, twin.token, eps, MAP_CODES[twin.name], twin.parts, twin.flows,
        group,
    )  # fmt: skip
    return found


def _twin(feature_map: FeatureMap | None) -> Twin | None:
    """The twin of a map; that of the identity if there is no map."""
    return Twin("identity", 1) if feature_map is None else feature_map.twin()
