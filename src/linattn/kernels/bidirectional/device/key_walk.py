# mypy: ignore-errors
"""A walk over keys and values, backward: dpsi_s = dS v_s + dz and dv_s = dS^T psi_s."""

import triton
import triton.language as tl

from linattn.kernels.bidirectional.device.common import key_grads
from linattn.kernels.bidirectional.device.features import counting, load_mapped, over_tokens, paired, store_mapped_grad
from linattn.kernels.bidirectional.device.memory import load_rows, store_rows, visible
from linattn.kernels.maps.device.codes import is_short
from linattn.kernels.maps.device.function_grads import store_table_grad, table_terms
from linattn.kernels.maps.device.functions import load_table


@triton.jit
def walk_keys(
    k, v, mask, dk, dv, table_k, token_k, d_table_k, d_token_k, d_state, constants,
    k_t, k_d, v_t, v_d, dk_t, dv_t, mask_t, token_k_t, first, end,
    HAS_MASK: tl.constexpr, MAP_K: tl.constexpr, TOKEN_K: tl.constexpr, LEARN_K: tl.constexpr, CONSTANT: tl.constexpr,
    PARTS: tl.constexpr, TURNED: tl.constexpr, SPLIT: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Tokens first ... end - 1 of one head, which the pointers are those of.

    d_state: dS as operands (high, low, and those of part 1; transposed if TURNED), dz, that of part 1. constants: the
    constant feature, the gradients of the state's row for it (BV,) and of its part of z. Returns the gradient of the
    constant feature.
    """
    IEEE: tl.constexpr = k.dtype.element_ty == tl.float32
    SHORT: tl.constexpr = is_short(k.dtype.element_ty)
    high, low, high2, low2, dz, dz2 = d_state
    c_k, d_row, d_count = constants
    d_c = tl.zeros((BT,), tl.float32)
    params = load_table(table_k, MAP_K, D, BK)
    a_rows = tl.zeros((BT // 16, 8, BK), tl.float32)
    b_rows = a_rows
    for t in range(first, end, BT):
        keep = visible(mask, t, end, mask_t, HAS_MASK, BT)
        exists = t + tl.arange(0, BT) < end
        keys, keys2, tile = load_mapped(
            k, t, keep, k_t, k_d, params, token_k, token_k_t, MAP_K, TOKEN_K, False, D, BT, BK
        )
        values = load_rows(v, t, keep, v_t, v_d, V, BT, BV)
        d_keys, d_values = key_grads(keys, values, high, low, TURNED, SPLIT, IEEE, BT, BK, BV)
        d_keys += dz[None, :]
        d_keys2 = d_keys
        if PARTS == 2:
            d_keys2, more = key_grads(keys2, values, high2, low2, TURNED, SPLIT, IEEE, BT, BK, BV)
            d_keys2 += dz2[None, :]
            d_values += more
        if CONSTANT:
            d_c += tl.where(keep, tl.sum(values.to(tl.float32) * d_row[None, :], 1) + d_count, 0.0)
            d_values += tl.where(keep[:, None], c_k * d_row[None, :], 0.0)
        if MAP_K < 0:
            if HAS_MASK:
                d_keys = tl.where(keep[:, None], d_keys, 0.0)
            store_rows(dk, t, exists, dk_t, d_keys, D, BT, BK)
        else:
            grad, grad2 = store_mapped_grad(
                tile, t, keep, exists, params, token_k, token_k_t, counting(tile, d_keys, d_keys2, MAP_K), d_keys2,
                dk, dk_t, d_token_k, MAP_K, TOKEN_K, D, BT, BK,
            )  # fmt: skip
            if LEARN_K:
                to_a, to_b = table_terms(tile[0], tile[1], tile[3], grad, grad2, params, MAP_K, SHORT, BT, BK)
                a_rows, b_rows = a_rows + paired(to_a, BT, BK), b_rows + paired(to_b, BT, BK)
        store_rows(dv, t, exists, dv_t, d_values, V, BT, BV)
    if LEARN_K:
        to_a, to_b = over_tokens(a_rows, BT, BK), over_tokens(b_rows, BT, BK)
        store_table_grad(d_table_k, to_a, to_b, params, MAP_K, D, BK)
    return tl.sum(d_c, 0)
