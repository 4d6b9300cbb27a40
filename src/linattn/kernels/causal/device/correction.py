# mypy: ignore-errors
"""The denominator's gradient in full digits, from the walks of dq that used one made of the rounded output.

A walk gives u . out = q_i . dq_i = r_i (do_i . num_i + e_i den_i) in fp32. The do . num that follows from it, and thus
e_i = -slope r_i do_i . num_i, has not been rounded to the output's 16 bits. For dq the rounded e is good enough. For
the gradient of a decay it is not: that is a difference of these dots and those of dk, which must come from the same e.

    along    (3, TILES, rows) fp32: q . dq without the diagonal, which is corrected in its first tile; the diagonal's
             share of it; q . k on the diagonal (its first KEY_TILES tiles)
    against  (TILES, rows) fp32: q . dq of the sweep against time, corrected likewise        AGAINST: there is one
    den, den_against, scale (r), e   (rows,) fp32: row sums of both sweeps, of the one against time; e is corrected
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def correct_denominator(
    along, along_plane, along_tile, against, against_tile, den, den_against, scale, e, rows,
    TILES: tl.constexpr, KEY_TILES: tl.constexpr, NORM: tl.constexpr, AGAINST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < rows
    found = tl.zeros([BLOCK], tl.float32)
    keys = tl.zeros([BLOCK], tl.float32)
    for tile in range(TILES):
        p = along + tile * along_tile + at
        found += tl.load(p, mask=ok, other=0.0) + tl.load(p + along_plane, mask=ok, other=0.0)
        if AGAINST:
            found += tl.load(against + tile * against_tile + at, mask=ok, other=0.0)
    for tile in range(KEY_TILES):
        keys += tl.load(along + 2 * along_plane + tile * along_tile + at, mask=ok, other=0.0)
    total = tl.load(den + at, mask=ok, other=1.0)
    r = tl.load(scale + at, mask=ok, other=1.0)
    before = tl.load(e + at, mask=ok, other=0.0)
    exact = r * total * before - found
    if NORM == 2:
        # |den| divides where it is at least 1, and nothing does elsewhere.
        exact = tl.where(tl.abs(total) >= 1.0, tl.where(total > 0, exact, -exact), 0.0)
    tl.store(e + at, exact, mask=ok)
    more = r * (exact - before)
    others = total - keys
    if AGAINST:
        back = tl.load(den_against + at, mask=ok, other=0.0)
        others -= back
        tl.store(against + at, tl.load(against + at, mask=ok, other=0.0) + more * back, mask=ok)
    tl.store(along + at, tl.load(along + at, mask=ok, other=0.0) + more * others, mask=ok)
