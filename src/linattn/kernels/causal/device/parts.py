# mypy: ignore-errors
# ruff: noqa: SIM108
"""What the causal sweep does with a tile apart from attention.

rows, columns   which tokens and features of a tile exist        S (BX, BW), zc (BX,), zr (BW,)  state and key sums
All other names                                                  see sweep
"""

import triton
import triton.language as tl

from linattn.kernels.common.support import interpreted

INTERPRETED: tl.constexpr = tl.constexpr(interpreted())


@triton.jit
def inside(rows, columns, width: tl.constexpr, block: tl.constexpr):
    """Mask of a tile; full tiles need none for their columns, and registers are short."""
    if width % block == 0:
        found = rows[:, None]
    else:
        found = rows[:, None] & columns[None, :]
    return found


@triton.jit
def first_row(b, h, heads, at, T, W: tl.constexpr, SIDE_BY_SIDE: tl.constexpr):
    """Where token ``at`` of a head begins in a result (B, heads, T, W), whose tokens are SIDE_BY_SIDE W numbers apart.

    SIDE_BY_SIDE: so many heads of a token lie together, all of them or one. The compiler knows the number: as an
    argument it took registers, and up to 56 bytes more of a thread were spilled.
    """
    if SIDE_BY_SIDE > 1:
        found = ((b * T + at) * SIDE_BY_SIDE + h) * W
    else:
        found = ((b * heads + h) * T + at) * W
    return found


@triton.jit
def add_product(a, b, sums, PREC: tl.constexpr):
    """sums + a b. In fp32 the product is made first: added one by one, its terms would each be rounded as sums is."""
    if PREC == "ieee" and not INTERPRETED:
        found = added_after(tl.dot(a, b, input_precision=PREC), sums)
    else:
        found = tl.dot(a, b, sums, input_precision=PREC)
    return found


@triton.jit
def added_after(product, more):
    """product + more in fp32, by an addition that the compiler does not see.

    Seen, it would become the start value of the product, or of one that made more. Where more is read again later,
    that goes wrong on Hopper: of scores that a mask drops for good, the assembler took the register for more, and the
    product wrote them there all the same.
    """
    if INTERPRETED:
        found = product + more
    else:
        found = tl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [product, more], tl.float32, True, 1)
    return found


@triton.jit
def from_before(
    xv, S, S_dt, zc, zr, reading, e, keep, PREC: tl.constexpr,
    DECAY: tl.constexpr, FACTORED: tl.constexpr, SCALE: tl.constexpr, EXTRA: tl.constexpr, ZCOL: tl.constexpr,
    ZROW: tl.constexpr, RESTS: tl.constexpr,
):  # fmt: skip
    """What a chunk's tokens get from before the chunk (L, BW), and the state and its key sums decayed by the chunk.

    FACTORED: the former without the factor of its row.
    """
    acc = tl.dot(xv, S_dt, input_precision=PREC)
    if RESTS:
        acc = tl.dot(xv, rest_by_pairs(S, S_dt), acc, input_precision=PREC)
    if ZROW == 1 and EXTRA == 1:
        acc += e[:, None] * zr[None, :]
    if ZROW == 2:
        acc += zr[None, :]
    if FACTORED:
        acc = acc * keep
    elif DECAY or SCALE == 1:
        acc = acc * reading[:, None]
    if DECAY:
        S = S * keep
        if ZCOL:
            zc = zc * keep
        if ZROW > 0:
            zr = zr * keep
    return acc, S, zc, zr


@triton.jit
def held_no_longer(tile):
    """Tell the compiler that registers use the tile, and do nothing with it: the copy into them is then dropped.

    A tile that only products read gets one buffer more than the stages need, for products that outlast their round.
    None does here, see chunk; without that buffer two programs with three stages fit into a multiprocessor.
    """
    tl.inline_asm_elementwise("// $0 $1", "=r,r", [tile], tl.bfloat16, False, 2)


@triton.jit
def sum_in_parts(keys, PARTS: tl.constexpr):
    """(BX, L) to (BX, PARTS): the tokens that one thread holds are summed, nothing crosses threads."""
    return tl.sum(tl.reshape(keys, (keys.shape[0], keys.shape[1] // PARTS, PARTS)), axis=1)


@triton.jit
def spread(z, L: tl.constexpr, DT: tl.constexpr):
    """(BX, PARTS) to (BX, L) in DT: columns that add up to the sum of z, as value and rest of its rounding.

    The sum of a row of scores with them is x . z, by a product as wide as any other.
    """
    COPIES: tl.constexpr = L // (2 * z.shape[1])
    share = z * (1.0 / COPIES)
    value = share.to(DT)
    wide = tl.join(value, rest_of(share, value))
    # Doubled by joining with itself, inside each thread: a broadcast would go through shared memory.
    if COPIES >= 2:
        wide = tl.join(wide, wide)
    if COPIES >= 4:
        wide = tl.join(wide, wide)
    return tl.reshape(wide, (z.shape[0], L))


@triton.jit
def rest_of(x, rounded):
    """What the rounding of x (fp32) has left over, in the dtype it was rounded to."""
    return (x - rounded.to(tl.float32)).to(rounded.dtype)


@triton.jit
def rest_by_pairs(x, rounded):
    """The same by pairs: a conversion that is issued alone, as those of rest_of are, takes many times as long."""
    if rounded.dtype == tl.bfloat16 and not INTERPRETED:
        rest = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            shl.b32 low, $3, 16;
            and.b32 high, $3, 0xffff0000;
            sub.rn.f32 low, $1, low;
            sub.rn.f32 high, $2, high;
            cvt.rn.bf16x2.f32 $0, high, low;
            }""",
            "=r,f,f,r", [x, rounded], tl.bfloat16, True, 2,
        )  # fmt: skip
    else:
        rest = rest_of(x, rounded)
    return rest


@triton.jit
def keep_mark(S, zr, marks, z_marks, place, size, ex, ew, query, X: tl.constexpr, W: tl.constexpr, Z: tl.constexpr):
    """Keep the state, or its gradient, at the end of a stretch of chunks; of a group's queries the first one does."""
    if query == 0:
        p = marks + place * size + ex[:, None] * W + ew[None, :]
        tl.store(p, S.to(marks.dtype.element_ty), mask=(ex < X)[:, None] & (ew < W)[None, :])
        if Z:
            tl.store(z_marks + place * W + ew, zr, mask=ew < W)


@triton.jit
def weakest(keeps, count):
    """The least that any of the chunks leaves of a state."""
    least = tl.full([64], 1.0, tl.float32)
    for j in range(0, count, 64):
        at = j + tl.arange(0, 64)
        least = tl.minimum(least, tl.load(keeps + at, mask=at < count, other=1.0))
    return tl.min(least, axis=0)


@triton.jit
def shortest(spans, count, L: tl.constexpr):
    """Tokens of the shortest chunk."""
    least = tl.full([64], L, tl.int32)
    for j in range(0, count, 64):
        at = j + tl.arange(0, 64)
        least = tl.minimum(least, tl.load(spans + at, mask=at < count, other=L))
    return tl.min(least, axis=0)


@triton.jit
def unpacked(tile):
    """In fp32. Two numbers of bf16 in two instructions: the compiler takes one more for the upper one."""
    if tile.dtype == tl.bfloat16:
        found = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [tile], tl.float32, True, 2
        )
    else:
        found = tile.to(tl.float32)
    return found
