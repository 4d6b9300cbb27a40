# mypy: ignore-errors
"""The gradient of the log decays, from q . dq and k . dk alone.

A pair's weight is exp(f_t - f_s), so through the potentials token t gets q_t . dq_t - k_t . dk_t; a log decay gets the
sum over the potentials that hold it. A sum along the whole sequence would gather rounding, most of all in the sum over
tokens that a decay per head gets, so it starts anew at the end of every stretch from <state, gradient of the state>.
The end of the stretch before gives the value that the sum must have at the start of its stretch. The difference is
rounding, and is taken off where rounding occurred: in proportion to the sizes of the dots. Where these are 0, after all
tokens that the loss depends on, the gradient is 0 and stays so.

    q_dots (QT, B, HS G, T)   k_dots (KT, B, HS, T): fp32, in tiles of columns that are summed here in order
    marks, d_marks (HS places, SIZE) and z_marks, dz_marks (.., K): state and gradient, which the sweeps kept; stretch j
           of packed sequence n, which starts at token s, lies at s // stretch + n + j
    da     (B, HS, T) fp32

EXCLUSIVE: f_t does not include a_t. With NEGATE the pairs run against time. With ADD the result is added to da. START:
there is a state before the first token, for which there is no mark.
"""

import triton
import triton.language as tl


@triton.jit
def across(
    marks, d_marks, z_marks, dz_marks, place, begun, end,
    SIZE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """<state, gradient of the state> at a mark: all pairs with a token on either side. 0 unless begun < end."""
    products = tl.zeros([BLOCK], tl.float32)
    for block in range(0, SIZE, BLOCK):
        es = block + tl.arange(0, BLOCK)
        some = (es < SIZE) & (begun + 0 * es < end)
        products += tl.load(marks + place * SIZE + es, mask=some, other=0.0) * tl.load(
            d_marks + place * SIZE + es, mask=some, other=0.0
        )
    found = tl.sum(products, axis=0).to(tl.float64)
    if Z:
        ek = tl.arange(0, BK)
        some = (ek < K) & (begun + 0 * ek < end)
        keys = tl.load(z_marks + place * K + ek, mask=some, other=0.0)
        found += tl.sum(keys * tl.load(dz_marks + place * K + ek, mask=some, other=0.0), axis=0).to(tl.float64)
    return found


@triton.jit(do_not_specialize=["T", "stretches", "places", "HS", "q_tile", "k_tile"])
def decay_gradient(
    q_dots, q_tile, k_dots, k_tile, marks, d_marks, z_marks, dz_marks, cu, da, T, stretches, places, HS,
    QT: tl.constexpr, KT: tl.constexpr, G: tl.constexpr, STRETCH: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr,
    BLOCK: tl.constexpr, BK: tl.constexpr, Z: tl.constexpr,
    EXCLUSIVE: tl.constexpr, NEGATE: tl.constexpr, ADD: tl.constexpr, PACKED: tl.constexpr, START: tl.constexpr,
):  # fmt: skip
    # A program has one sequence, key head and stretch.
    pid = tl.program_id(0).to(tl.int64)
    j = pid % stretches
    pid = pid // stretches
    hs = pid % HS
    n = pid // HS
    if PACKED:
        b = n * 0
        first = tl.load(cu + n).to(tl.int64)
        last = tl.load(cu + n + 1).to(tl.int64)
        place = hs * places + first // STRETCH + n + tl.minimum(j, (last - first) // STRETCH)
    else:
        b = n
        first = n * 0
        last = first + T
        place = (n * HS + hs) * places + j
    t = first + j * STRETCH + tl.arange(0, STRETCH)
    ok = t < last
    # fp64: the sums cancel, and there are few numbers.
    own = tl.zeros([STRETCH], tl.float64)
    size = tl.zeros([STRETCH], tl.float64)
    begun = first + j * STRETCH
    after = across(marks, d_marks, z_marks, dz_marks, place, begun, last, SIZE, K, BLOCK, BK, Z)
    earlier = tl.where(j > 0, last, begun)
    before = across(marks, d_marks, z_marks, dz_marks, place - 1, begun, earlier, SIZE, K, BLOCK, BK, Z)
    for tile in range(QT):
        for group in range(G):
            at = tile * q_tile + ((b * HS + hs) * G + group) * T + t
            dot = tl.load(q_dots + at, mask=ok, other=0.0).to(tl.float64)
            own += dot
            size += tl.abs(dot)
    for tile in range(KT):
        dot = tl.load(k_dots + tile * k_tile + (b * HS + hs) * T + t, mask=ok, other=0.0).to(tl.float64)
        own -= dot
        size += tl.abs(dot)
    if NEGATE:
        own = -own
    # Summed from the end: sums of zeros are zeros.
    later = tl.cumsum(own, axis=0, reverse=True)
    sizes = tl.cumsum(size, axis=0, reverse=True)
    whole = tl.sum(size, axis=0)
    missed = after + tl.sum(own, axis=0) - before
    if START:
        missed = tl.where(j > 0, missed, 0.0)
    if EXCLUSIVE:
        later -= own
        sizes -= size
    found = after + later - missed * (sizes / tl.where(whole > 0.0, whole, 1.0))
    at = (b * HS + hs) * T + t
    if ADD:
        found += tl.load(da + at, mask=ok, other=0.0).to(tl.float64)
    tl.store(da + at, found.to(tl.float32), mask=ok)
