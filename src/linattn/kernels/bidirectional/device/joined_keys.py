# mypy: ignore-errors
"""A walk over keys and values, backward, for both flows of split_power at once; see joined_tiles."""

import triton
import triton.language as tl

from linattn.kernels.bidirectional.device.common import times_wide
from linattn.kernels.bidirectional.device.joined_tiles import (
    by_side,
    from_both,
    kept_sums,
    load_columns,
    operands,
    power_of,
    store_columns,
)
from linattn.kernels.bidirectional.device.memory import load_rows, store_rows, visible
from linattn.kernels.maps.device.codes import SPLIT_POWER
from linattn.kernels.maps.device.function_grads import store_table_grad
from linattn.kernels.maps.device.functions import load_table
from linattn.kernels.maps.device.numbers import over


@triton.jit
def walk_joined_keys(
    k, v, mask, dk, dv, table_k, d_table_k, d_state, k_t, k_d, v_t, v_d, dk_t, dv_t, mask_t, first, end,
    HAS_MASK: tl.constexpr, LEARN_K: tl.constexpr, SPLIT: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tokens first ... end - 1 of one head: dpsi_s = dS v_s + dz and dv_s = dS^T psi_s.

    d_state: dS_00, dS_01, dS_10, dS_11 (D, BV), dz, dz2 (D,) for the features of flow 0.
    """
    dtype: tl.constexpr = k.dtype.element_ty
    BF16: tl.constexpr = dtype == tl.bfloat16
    dS00, dS01, dS10, dS11, dz, dz2 = d_state
    high00, low00 = operands(dS00, BF16)
    high01, low01 = operands(dS01, BF16)
    high10, low10 = operands(dS10, BF16)
    high11, low11 = operands(dS11, BF16)
    params = load_table(table_k, SPLIT_POWER, D, D)
    a, b = tl.trans(params[0]), tl.trans(params[1])
    to_a, to_b = tl.zeros((D, 4), tl.float32), tl.zeros((D, 4), tl.float32)
    for t in tl.range(first, end, BT, num_stages=STAGES):
        keep = visible(mask, t, end, mask_t, HAS_MASK, BT)
        exists = t + tl.arange(0, BT) < end
        raw = load_columns(k, t, keep, k_t, k_d, BT, D)
        psi, psi2, side, log, c = power_of(raw, a, b, dtype)
        values0 = load_rows(v, t, keep, v_t, v_d, V, BT, BV)
        values1 = load_rows(v + V * v_d, t, keep, v_t, v_d, V, BT, BV)
        d_psi, d_psi2 = tl.zeros((D, BT), tl.float32), tl.zeros((D, BT), tl.float32)
        d_psi = from_both(d_psi, tl.trans(values0), high00, low00, SPLIT)
        d_psi2 = from_both(d_psi2, tl.trans(values0), high01, low01, SPLIT)
        d_psi = from_both(d_psi, tl.trans(values1), high10, low10, SPLIT)
        d_psi2 = from_both(d_psi2, tl.trans(values1), high11, low11, SPLIT)
        psi_t, psi2_t = tl.trans(psi), tl.trans(psi2)
        dv0 = times_wide(psi_t, high00, tl.zeros((BT, BV), tl.float32), False)
        dv1 = times_wide(psi_t, high10, tl.zeros((BT, BV), tl.float32), False)
        dv0 = times_wide(psi2_t, high01, dv0, False)
        dv1 = times_wide(psi2_t, high11, dv1, False)
        if SPLIT:
            dv0 = times_wide(psi2_t, low01, times_wide(psi_t, low00, dv0, False), False)
            dv1 = times_wide(psi2_t, low11, times_wide(psi_t, low10, dv1, False), False)
        store_rows(dv, t, exists, dv_t, dv0, V, BT, BV)
        store_rows(dv + V, t, exists, dv_t, dv1, V, BT, BV)
        d_psi = by_side(side, d_psi + dz[:, None], d_psi2 + dz2[:, None]) * c
        store_columns(dk, t, exists, dk_t, over(d_psi * (a * b), side, True), BT, D)
        if LEARN_K:
            to_a += kept_sums(d_psi * log, BT, D)
            to_b += kept_sums(d_psi, BT, D)
    if LEARN_K:
        store_table_grad(d_table_k, tl.sum(to_a, 1), tl.sum(to_b, 1), params, SPLIT_POWER, D, D)
