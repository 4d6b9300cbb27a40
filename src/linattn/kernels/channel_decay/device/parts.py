"""What the kernels of a decay per channel share: where a program stands, loads and products.

Names: C tokens of a chunk, K and V widths (BK, BV padded tiles of them), t and s tokens (query and key).
"""
# mypy: ignore-errors
# ruff: noqa: SIM108 - conditions at compile time stay apart from those at run time

import triton
import triton.language as tl

from linattn.kernels.causal.device.parts import rest_by_pairs
from linattn.kernels.common.support import interpreted

# The interpreter multiplies the bit patterns of bf16 numbers: there operands are made fp32 first.
INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """Matrix product, summed in fp32."""
    if INTERPRETED:
        found = tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
    else:
        found = tl.dot(x, y, input_precision=PRECISION)
    return found


@triton.jit
def add_product(total, x, y, PRECISION: tl.constexpr):
    if INTERPRETED:
        found = tl.dot(x.to(tl.float32), y.to(tl.float32), acc=total, input_precision="ieee")
    else:
        found = tl.dot(x, y, acc=total, input_precision=PRECISION)
    return found


@triton.jit
def operand(x, DT: tl.constexpr, PRECISION: tl.constexpr):
    """fp32 numbers as a product takes them. One of tf32 would cut off 13 bits: done here, others see what it sees."""
    if PRECISION == "tf32" and not INTERPRETED:
        x = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    else:
        x = x.to(DT)
    return x


@triton.jit
def as_rounded(x, DT: tl.constexpr, PRECISION: tl.constexpr):
    """The same in fp32, converted in pairs: one by one takes far longer."""
    if tl.bfloat16 == DT and not INTERPRETED:
        x = tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
            "=r,=r,r,r", [x], tl.float32, True, 2,
        )  # fmt: skip
    else:
        x = operand(x, DT, PRECISION).to(tl.float32)
    return x


@triton.jit
def product_of_sum(x, total, DT: tl.constexpr, PRECISION: tl.constexpr):
    """``x`` times a sum in fp32, in two parts where a product rounds it: its value, and what that leaves over."""
    value = operand(total, DT, PRECISION)
    found = product(x, value, PRECISION)
    if tl.bfloat16 == DT:
        found = add_product(found, x, rest_by_pairs(total, value), PRECISION)
    elif PRECISION == "tf32":
        found = add_product(found, x, total - value, PRECISION)
    return found


@triton.jit
def spread(x, like):
    """A scalar as a block: the interpreter mistakes the type of a mask made from a scalar comparison."""
    return x + tl.zeros_like(like)


@triton.jit
def place(table, row, segment, T, span, PACKED: tl.constexpr):
    """Tokens [start, end) of a segment, its sequence (0 unless packed) and that sequence's tokens [first, last)."""
    if PACKED:
        start = tl.load(table + segment * 5)
        end = tl.load(table + segment * 5 + 1)
        sequence = tl.load(table + segment * 5 + 2)
        first = tl.load(table + segment * 5 + 3)
        last = tl.load(table + segment * 5 + 4)
    else:
        start = segment * span
        end = tl.minimum(start + span, T)
        sequence = segment * 0
        first = segment * 0
        last = first + T
    return start, end, sequence, first, last


@triton.jit
def tokens(end, chunk, C: tl.constexpr):
    """Which tokens (C,) of a chunk are there."""
    return tl.arange(0, C) < tl.minimum(end - chunk, C).to(tl.int32)


@triton.jit
def on_rows(live, d, D: tl.constexpr):
    """Mask of a tile (C, BD), or only (C, 1) where all columns are there."""
    if tl.constexpr(D) % d.shape[0] == 0:
        found = live[:, None]
    else:
        found = live[:, None] & (d < D)[None, :]
    return found


@triton.jit
def offsets(d, stride_t, C: tl.constexpr):
    """Of a tile (C, BD). In 64 bits a row's distance to the next is a number in the instruction, else a register."""
    return tl.arange(0, C).to(tl.int64)[:, None] * stride_t + d.to(tl.int64)[None, :]


@triton.jit
def load_rows(base, stride_t, live, d, D: tl.constexpr, C: tl.constexpr):
    """(C, BD) from ``base``, the first token of a chunk; 0 where a token (C,) is not live or a column is beyond D.

    The chunk's place is in the base, so offsets inside it are the same for all chunks.
    """
    return tl.load(base + offsets(d, stride_t, C), mask=on_rows(live, d, D), other=0.0)


@triton.jit
def fetch(base, stride_t, left, start, D: tl.constexpr, C: tl.constexpr):
    """Ask for columns [start, start + D) of the next chunk's rows, ``left`` of C, to be brought near.

    No register waits for them, as one would in a pipeline, and what then loads them waits for the cache only.
    """
    if not INTERPRETED:
        LINE: tl.constexpr = 1024 // base.dtype.element_ty.primitive_bitwidth  # 128 bytes
        WIDTH: tl.constexpr = max(1, D // LINE)
        row = tl.minimum(tl.arange(0, C), tl.maximum(left, 1).to(tl.int32) - 1).to(tl.int64)
        at = base + row[:, None] * stride_t + (start + tl.arange(0, WIDTH) * LINE)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], tl.int32, False, 1
        )


@triton.jit
def load_columns(base, stride_t, live, d, D: tl.constexpr, C: tl.constexpr):
    """``load_rows`` with features first, (BD, C).

    A product that needs such an operand loads it so: what a product gave must not be transposed for another one, which
    some compilers get wrong, and what a decay did to an operand comes out of a product.
    """
    base += tl.arange(0, C).to(tl.int64)[None, :] * stride_t + d.to(tl.int64)[:, None]
    if tl.constexpr(D) % d.shape[0] == 0:
        found = tl.load(base, mask=live[None, :], other=0.0)
    else:
        found = tl.load(base, mask=live[None, :] & (d < D)[:, None], other=0.0)
    return found


@triton.jit
def live_keys(base, stride_t, live, C: tl.constexpr, MASKED: tl.constexpr):
    """Tokens (C,) that are there and that the key mask shows."""
    if MASKED:
        live = live & (tl.load(base + tl.arange(0, C) * stride_t, mask=live, other=0) != 0)
    return live
