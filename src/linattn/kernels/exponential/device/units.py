# mypy: ignore-errors
"""Exponential gates as factors of tokens, chunk by chunk: the form in which the walks take them.

    m_t = max(m_{t-1} + f_t, i_t)                  running maximum, the unit of the sums after token t is e^{m_t}
    g_t = f_t + m_{t-1} - m_t <= 0                 what a token does to sums that are measured in it
    rho_t = g_{t+1} + ... + g_E <= 0               from token t to the last of its chunk, E, or of a few slow chunks

    column_t = e^{rho_t + i_t - m_t}               of its key and value, in the unit of the chunk's end
    floor_t  = e^{rho_t - m_t} / scale             the 1 of max(|q . n|, 1), in the same unit
    keep     = e^{g_A + ... + g_E}                 what the chunk A..E leaves of a state, from unit to unit: 1 between
                                                   slow chunks, of which the first has it all

    i, f          (B, HS, T) log input and log decay, any strides      start  (N, HS) fp64, m before the first token
    gates         (B, HS, T, 2) fp32: column and floor of a token      last   (N, HS) fp64, m after the last token
    keep          (B, HS, T) fp32, equal in a chunk
    spans         (rows, places) int32: tokens of a chunk in each tile of L. L, unless e^{rho} would leave fp32; then
                  L / 8; then 1, where rho = 0. Tile j of packed sequence n, which starts at s: place s // L + n + j
    sums, bests   (rows, blocks) fp64: each block of tokens as a map m -> max(m + sum, best)

The maps m -> max(m + a, b) compose into maps of the same kind. One kernel makes that of each block, the second starts
from those before its own. fp64: gates are few, and their sums cancel. Numbers below NOTHING / 2 stand for -inf: with
inf itself differences would be NaN, here they are large or 0.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-1e200)
# A forgotten past: beyond every gate in fp32, and small beside NOTHING however often it is added.
CLOSED = tl.constexpr(-1e100)


@triton.jit
def compose(a, b, later_a, later_b):
    return a + later_a, tl.maximum(b + later_a, later_b)


@triton.jit
def gates_at(i, i_t, f, f_t, t, ok):
    """Log input and log decay in fp64, finite; tokens that are not there add and decay nothing."""
    it = tl.load(i + t * i_t, mask=ok, other=float("-inf")).to(tl.float64)
    ft = tl.load(f + t * f_t, mask=ok, other=0.0).to(tl.float64)
    return tl.maximum(it, NOTHING), tl.maximum(ft, CLOSED)


@triton.jit
def exp_of(x):
    """e^x in fp32 for x in fp64: 2^whole 2^fraction, as fp32 cuts digits off x that e^x shows."""
    power = tl.maximum(x, -200.0) * 1.4426950408889634
    whole = tl.floor(power + 0.5)
    return tl.exp2(whole.to(tl.float32)) * tl.exp2((power - whole).to(tl.float32))


@triton.jit
def sequence_of(pid, cu, T, HS, blocks, PACKED: tl.constexpr):
    """Of a program: block, key head, sequence, row of the batch, first token and the one after the last."""
    block = pid % blocks
    hs = (pid // blocks) % HS
    n = pid // (blocks * HS)
    if PACKED:
        b = n * 0
        first = tl.load(cu + n).to(tl.int64)
        end = tl.load(cu + n + 1).to(tl.int64)
    else:
        b = n
        first = n * 0
        end = first + T
    return block, hs, n, b, first, end


@triton.jit(do_not_specialize=["T", "HS", "blocks"])
def block_maps(
    i, i_b, i_h, i_t, f, f_b, f_h, f_t, cu, sums, bests, T, HS, blocks, BLOCK: tl.constexpr, PACKED: tl.constexpr
):
    pid = tl.program_id(0).to(tl.int64)
    block, hs, _, b, first, end = sequence_of(pid, cu, T, HS, blocks, PACKED)
    j = tl.arange(0, BLOCK)
    t = first + block * BLOCK + j
    it, ft = gates_at(i + b * i_b + hs * i_h, i_t, f + b * f_b + hs * f_h, f_t, t, t < end)
    total, best = tl.associative_scan((ft, it), 0, compose)
    tl.store(sums + pid, tl.min(tl.where(j == BLOCK - 1, total, 0.0), axis=0))
    tl.store(bests + pid, tl.max(tl.where(j == BLOCK - 1, best, NOTHING), axis=0))


@triton.jit
def to_the_end(g, CHUNKS: tl.constexpr, SPAN: tl.constexpr):
    """rho, and the whole of each chunk of SPAN tokens for each of them."""
    g = tl.reshape(g, [CHUNKS, SPAN])
    whole = tl.sum(g, axis=1)[:, None]
    return whole - tl.cumsum(g, axis=1), whole + tl.zeros([CHUNKS, SPAN], tl.float64)


@triton.jit(do_not_specialize=["T", "HS", "blocks", "places", "scale"])
def units(
    i, i_b, i_h, i_t, f, f_b, f_h, f_t, cu, start, sums, bests, gates, keep, spans, last,
    T, HS, blocks, places, scale,
    BLOCK: tl.constexpr, L: tl.constexpr, PACKED: tl.constexpr, START: tl.constexpr, STRONGEST: tl.constexpr,
    STEEPEST: tl.constexpr, GENTLE: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    # STRONGEST: the least g. STEEPEST: the least rho of a chunk. GENTLE: that of tiles that share a unit. LEAST,
    # MOST: of the exponent of a floor.
    TILES: tl.constexpr = BLOCK // L
    SHARED: tl.constexpr = min(4, TILES)
    FINE: tl.constexpr = L // 8
    pid = tl.program_id(0).to(tl.int64)
    block, hs, n, b, first, end = sequence_of(pid, cu, T, HS, blocks, PACKED)
    m = tl.full([], NOTHING, tl.float64)
    if START:
        m = tl.maximum(tl.load(start + n * HS + hs).to(tl.float64), NOTHING)
    row = pid - block
    for before in range(0, block):
        m = tl.maximum(m + tl.load(sums + row + before), tl.load(bests + row + before))

    i += b * i_b + hs * i_h
    f += b * f_b + hs * f_h
    j = tl.arange(0, BLOCK)
    t = first + block * BLOCK + j
    ok = t < end
    it, ft = gates_at(i, i_t, f, f_t, t, ok)
    total, best = tl.associative_scan((ft, it), 0, compose)
    mt = tl.maximum(m + total, best)
    # One token earlier: a second scan, so that no number crosses threads through memory.
    i_before, f_before = gates_at(i, i_t, f, f_t, t - 1, (t <= end) & (j > 0))
    total, best = tl.associative_scan((f_before, i_before), 0, compose)
    before = tl.maximum(m + total, best)

    # Two scans may round differently: a decay must not come out above 0.
    g = tl.maximum(tl.minimum(ft + (before - mt), 0.0), STRONGEST)
    g = tl.where(mt < 0.5 * CLOSED, STRONGEST, g)  # everything was forgotten
    g = tl.where((before < 0.5 * CLOSED) | (t >= end), 0.0, g)  # nothing there to decay
    gain = tl.where(it < 0.5 * CLOSED, STRONGEST, tl.maximum(tl.minimum(it - mt, 0.0), STRONGEST))

    rho, whole = to_the_end(g, TILES, L)
    fine, fine_whole = to_the_end(g, TILES * 8, FINE)
    fine, fine_whole = tl.reshape(fine, [TILES, L]), tl.reshape(fine_whole, [TILES, L])
    steep = (tl.min(rho, axis=1) < STEEPEST)[:, None]
    steeper = steep & (tl.min(fine, axis=1) < STEEPEST)[:, None]
    own = tl.reshape(g, [TILES, L])
    # Where decays are slow, some tiles share the unit of the last of them: a state is then seldom put into another one.
    far, far_whole = to_the_end(g, TILES // SHARED, SHARED * L)
    gentle = tl.min(far, axis=1)[:, None] + 0.0 * far >= GENTLE
    far, gentle = tl.reshape(far, [TILES, L]), tl.reshape(gentle.to(tl.int32), [TILES, L]) > 0
    far_whole = tl.where((tl.arange(0, TILES) % SHARED == 0)[:, None], tl.reshape(far_whole, [TILES, L]), 0.0)
    rho = tl.where(steeper, 0.0, tl.where(steep, fine, rho))
    whole = tl.where(steeper, own, tl.where(steep, fine_whole, whole))
    rho, whole = tl.where(gentle, far, rho), tl.where(gentle, far_whole, whole)

    mt = tl.reshape(mt, [TILES, L])
    t = tl.reshape(t, [TILES, L])
    ok = t < end
    at = (b * HS + hs) * T + t
    column = exp_of(rho + tl.reshape(gain, [TILES, L]))
    floor = exp_of(tl.minimum(tl.maximum(rho - mt, LEAST), MOST)) / scale
    pair = tl.arange(0, 2)[None, None, :]
    tl.store(gates + 2 * at[:, :, None] + pair, tl.join(column, floor), mask=ok[:, :, None])
    tl.store(keep + at, exp_of(whole), mask=ok)
    tl.store(last + n * HS + hs + 0 * t, tl.where(mt < 0.5 * CLOSED, float("-inf"), mt), mask=t == end - 1)

    tile = block * TILES + tl.arange(0, TILES)
    place = (hs * places + first // L + n if PACKED else (n * HS + hs) * places) + tile
    some, most = tl.max(steep.to(tl.int32), axis=1) > 0, tl.max(steeper.to(tl.int32), axis=1) > 0
    span = tl.where(most, 1, tl.where(some, FINE, L))
    tl.store(spans + place, span, mask=first + tile * L < end)
    if (block == 0) & (first >= end):  # a sequence without tokens keeps its unit
        tl.store(last + n * HS + hs, tl.where(m < 0.5 * CLOSED, float("-inf"), m))
