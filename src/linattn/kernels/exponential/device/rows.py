# mypy: ignore-errors
"""Parts of the gradient of exponential attention by tokens: of the denominator before the walks, of gates after them.

rows:  o = N / n, n = max(|D|, floor). r = 1 / n; e with r e the gradient of D; a = q . dq, which is 0 where n = |D|, as
       the length of q cancels, and do . o where n is the floor. The first of TILES parts, the others are 0: where
       decays are steep the walk of dq puts its own there, which fit the e that has been made of a rounded o.

       o, d_o (B, H, T, V)    den (B, H, T), a (TILES, B, H, T) fp32
       pairs (B, HS, T, 2) fp32, of which the second is the floor    found (B, H, T, 2) fp32: r and e

gates: b = k . dk is the gradient of the log input. A pair's weight holds f_t for every t from behind its key to its
       query, so that of the log decays is the sum of a - b from the token on. A sum along the whole sequence would
       gather rounding: it starts anew at the end of every stretch from <state, gradient of the state>, the flows.

       a, b (TILES, B, H, T)   flows (TILES, rows places), one row a query head   f (B, HS, T), any strides
       d_i, d_f (B, HS, T) fp32
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "H", "count"])
def rows(
    o, o_b, o_h, o_t, o_d, d_o, g_b, g_h, g_t, g_d, den, pairs, found, a, T, H, count,
    TILES: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    live, d = row < count, tl.arange(0, BV)
    b, h, t = row // (T.to(tl.int64) * H), (row // T) % H, row % T
    here = live[:, None] & (d < V)[None, :]
    place = (b * o_b + h * o_h + t * o_t)[:, None] + d[None, :] * o_d
    x = tl.load(o + place, mask=here, other=0.0).to(tl.float32)
    place = (b * g_b + h * g_h + t * g_t)[:, None] + d[None, :] * g_d
    along = tl.sum(x * tl.load(d_o + place, mask=here, other=0.0).to(tl.float32), axis=1)
    total = tl.load(den + row, mask=live, other=1.0)
    lowest = tl.load(pairs + 2 * ((row // T) // GROUP * T + t) + 1, mask=live, other=1.0)
    free = tl.abs(total) >= lowest
    r = 1.0 / tl.maximum(tl.abs(total), lowest)
    e = tl.where(free, tl.where(total > 0, -along, along), 0.0)
    pair = tl.arange(0, 2)[None, :]
    tl.store(found + 2 * row[:, None] + pair, tl.join(r, e), mask=live[:, None])
    tl.store(a + row, tl.where(free, 0.0, along), mask=live)
    for tile in range(1, TILES):
        tl.store(a + tile * count.to(tl.int64) + row, tl.zeros([C], tl.float32), mask=live)


@triton.jit(do_not_specialize=["T", "H", "HS", "stretches", "places", "a_tile", "b_tile", "flows_tile"])
def gates(
    a, a_tile, b, b_tile, flows, flows_tile, f, f_b, f_h, f_t, cu, d_i, d_f, T, H, HS, stretches, places,
    A_TILES: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr, STRETCH: tl.constexpr, PACKED: tl.constexpr,
    STRONGEST: tl.constexpr,
):  # fmt: skip
    # A program has one sequence, key head and stretch.
    pid = tl.program_id(0).to(tl.int64)
    j = pid % stretches
    hs = (pid // stretches) % HS
    n = pid // (stretches * HS)
    if PACKED:
        line = n * 0
        first = tl.load(cu + n).to(tl.int64)
        end = tl.load(cu + n + 1).to(tl.int64)
        place = first // STRETCH + n + j
    else:
        line = n
        first = n * 0
        end = first + T
        place = j
    t = first + j * STRETCH + tl.arange(0, STRETCH)
    ok = t < end
    some = first + j * STRETCH < end
    # fp64: the sums cancel, and there are few numbers.
    as_key = tl.zeros([STRETCH], tl.float64)
    as_query = tl.zeros([STRETCH], tl.float64)
    after = tl.full([], 0.0, tl.float64)
    for group in range(GROUP):
        head = line * H + hs * GROUP + group
        for tile in range(A_TILES):
            as_query += tl.load(a + tile * a_tile + head * T + t, mask=ok, other=0.0).to(tl.float64)
        for tile in range(TILES):
            as_key += tl.load(b + tile * b_tile + head * T + t, mask=ok, other=0.0).to(tl.float64)
            after += tl.load(flows + tile * flows_tile + head * places + place, mask=some, other=0.0).to(tl.float64)
    own = as_query - as_key
    found = after + tl.cumsum(own, axis=0, reverse=True)  # sums of zeros are zeros
    decay = tl.load(f + line * f_b + hs * f_h + t * f_t, mask=ok, other=0.0)
    at = (line * HS + hs) * T + t
    tl.store(d_i + at, as_key.to(tl.float32), mask=ok)
    tl.store(d_f + at, tl.where(decay <= STRONGEST, 0.0, found).to(tl.float32), mask=ok)
