# mypy: ignore-errors
# ruff: noqa: RET505 (an if on a constexpr chooses code: both branches are spelled out for the compiler)
"""Features as the bidirectional kernels take them: handed over (MAP < 0), or made from raw inputs where they are read.

Heads and flows. A program serves the key head h and, with two flows, one flow f: its features are those of the flow and
its values the columns f V ... (f + 1) V - 1 of v, where V is the number of values per flow. ``table`` and ``token`` are
pointers to the head's parameters, see ``maps.py``. F features come from the map; with a constant feature a state has
one row more, K = F + 1.
Parts. If PARTS is 2, each part of D features has its own tiles and states, whose names end in 2 for the second part;
kernels use these under ``if PARTS == 2``. Otherwise they hold anything.
Flows JOINED. The flows of split_power differ only by an exchange of their parts. A program may then serve both, with V
the number of values of both, and exchange the parts of the state in the columns of flow 1 once.
"""

import triton
import triton.language as tl

from linattn.kernels.bidirectional.device.common import times
from linattn.kernels.bidirectional.device.memory import load_rows, store_rows
from linattn.kernels.maps.device.codes import is_short, one_sided
from linattn.kernels.maps.device.function_grads import tile_grad
from linattn.kernels.maps.device.functions import load_token, map_tile, parts_from

FOLD = tl.constexpr(16)


@triton.jit
def head_of(row, H_kv, FLOWS: tl.constexpr):
    """Sequence, key head and flow of a state's row."""
    virtual = row % (H_kv * FLOWS)
    return row // (H_kv * FLOWS), virtual // FLOWS, virtual % FLOWS


@triton.jit
def turns(table, table_f, F: tl.constexpr, BD: tl.constexpr):
    """(BD,): in which channels of split_power flow 1 has its two parts exchanged."""
    b = table + F + tl.arange(0, BD)
    return tl.load(b) * tl.load(b + table_f) < 0


@triton.jit
def exchanged(x, y, where):
    """x and y, with each other's numbers there."""
    return tl.where(where, y, x), tl.where(where, x, y)


@triton.jit
def as_product(raw, BT: tl.constexpr, BD: tl.constexpr):
    """raw (BT, BD) in fp32, spread over the threads as results of dots are: it is one, with 1 as the other factor.

    What is computed of it then meets gradients where they are; the tensor core has the time.
    """
    if is_short(raw.dtype):
        channel = tl.arange(0, BD)
        one = tl.where(channel[:, None] == channel[None, :], 1.0, 0.0).to(raw.dtype)
        return times(raw, one, tl.zeros((BT, BD), tl.float32))
    else:
        return raw


@triton.jit
def load_mapped(
    x, t0, keep, x_t, x_d, params, token, token_t,
    MAP: tl.constexpr, HAS_TOKEN: tl.constexpr, PRODUCT: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Features of both parts, (BT, BD) each in the dtype of the inputs, 0 in rows that are not kept; and a tile.

    The tile is what ``contracted`` and ``store_mapped_grad`` want to know: inputs, features without factors per token,
    those of part 1, a side (< 0: part 1 counts), features of the part that counts.
    """
    raw = load_rows(x, t0, keep, x_t, x_d, D, BT, BD)
    if MAP < 0:
        return raw, raw, (raw, raw, raw, raw, raw)
    else:
        dtype: tl.constexpr = x.dtype.element_ty
        if PRODUCT:
            raw = as_product(raw, BT, BD)
        factor = load_token(token, token_t, t0, keep, HAS_TOKEN, BT)
        core, second, side = map_tile(raw, keep[:, None], params, factor, MAP, is_short(dtype), D, BT, BD)
        first, other, whole = parts_from(core, second, side, factor, MAP, HAS_TOKEN, dtype)
        if HAS_TOKEN:
            return first, other, (raw, core, second, side, whole)
        else:
            return first, other, (raw, whole, other, side, whole)


@triton.jit
def counting(tile, y, y2, MAP: tl.constexpr):
    """y, or in a one-sided map that of y and y2 whose part counts."""
    if one_sided(MAP):
        return tl.where(tile[3] < 0, y2, y)
    else:
        return y


@triton.jit
def contracted(first, second, tile, y, y2, MAP: tl.constexpr, PARTS: tl.constexpr):
    """Features times y, y2, summed over all columns: (BT,). In a one-sided map y has been chosen by ``counting``."""
    products = tile[4].to(tl.float32) * y
    if PARTS == 2 and not one_sided(MAP):
        products += second.to(tl.float32) * y2
    return tl.sum(products, 1)


@triton.jit
def folded(x, BT: tl.constexpr, BD: tl.constexpr):
    """Sums (16, BD) of the rows of x (BT, BD) that one thread has: the rest is summed once, after the loop."""
    return tl.sum(tl.reshape(x.to(tl.float32), (BT // FOLD, FOLD, BD)), 0)


@triton.jit
def paired(x, BT: tl.constexpr, BD: tl.constexpr):
    """The same for results of dots, of which a thread has rows 8 apart: (BT / 16, 8, BD)."""
    return tl.sum(tl.reshape(x.to(tl.float32), (BT // 16, 2, 8, BD)), 1)


@triton.jit
def over_tokens(rows, BT: tl.constexpr, BD: tl.constexpr):
    """The sum (BD,) of sums of ``paired``."""
    return tl.sum(tl.reshape(rows, (BT // 2, BD)), 0)


@triton.jit
def store_mapped_grad(
    tile, t0, keep, exists, params, token, token_t, g, g2, dx, dx_t, d_token,
    MAP: tl.constexpr, HAS_TOKEN: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of x and of the factors per token; returns g and g2 as ``table_terms`` takes them."""
    raw, core, second, side, _ = tile
    factor = load_token(token, token_t, t0, keep, HAS_TOKEN, BT)
    d_x, d_factor, g, g2 = tile_grad(
        raw,
        core,
        second,
        side,
        g,
        g2,
        params,
        factor,
        keep[:, None],
        MAP,
        is_short(dx.dtype.element_ty),
        HAS_TOKEN,
        BT,
        BD,
    )
    store_rows(dx, t0, exists, dx_t, d_x, D, BT, BD)
    if HAS_TOKEN:
        tl.store(d_token + t0 + tl.arange(0, BT), d_factor, mask=exists)
    return g, g2
