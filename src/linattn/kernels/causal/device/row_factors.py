# mypy: ignore-errors
"""From the parts that causal_row_sums made to the row sums, and to the factors of the output's rows.

    parts, other  (PARTS, B, H, T) fp32, along time and against it (BOTH)     sums  (1 + BOTH, B, H, T) fp32
    gates, turned (B, HS, T) fp32: write of each direction (GATE 1)           factors  (B, H, T) fp32, 1 / n
    gates         (B, HS, T, 2) fp32: of which the second is the floor (GATE 2)

sums has those of both directions first, then those against time. NORM: 1 sum, 2 abs_max_one. A program has BLOCK rows.
"""

import triton
import triton.language as tl


@triton.jit
def added(parts, plane, row, ok, PARTS: tl.constexpr):
    total = tl.zeros(row.shape, tl.float32)
    for part in tl.static_range(0, PARTS):
        total += tl.load(parts + part * plane + row, mask=ok, other=0.0)
    return total


@triton.jit(do_not_specialize=["plane", "T", "H", "HS", "rows", "eps"])
def row_factors(
    parts, other, plane, gates, turned, sums, factors, T, H, HS, rows, eps,
    PARTS: tl.constexpr, DIV: tl.constexpr, GATE: tl.constexpr, BOTH: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = row < rows
    gate = (row // (H * T) * HS + (row // T) % H // DIV) * T + row % T
    total = added(parts, plane, row, ok, PARTS)
    if GATE == 1:
        total = total / tl.load(gates + gate, mask=ok, other=1.0)
    if BOTH:
        back = added(other, plane, row, ok, PARTS)
        if GATE == 1:
            back = back / tl.load(turned + gate, mask=ok, other=1.0)
        tl.store(sums + rows + row, back, mask=ok)
        total += back
    tl.store(sums + row, total, mask=ok)
    if GATE == 2:
        n = tl.maximum(tl.abs(total), tl.load(gates + 2 * gate + 1, mask=ok, other=1.0))
    elif NORM == 1:
        n = total + eps
    else:
        n = tl.maximum(tl.abs(total), 1.0)
    tl.store(factors + row, 1.0 / n, mask=ok)
