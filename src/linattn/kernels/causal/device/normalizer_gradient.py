"""What the normaliser's gradient needs, token by token: 1 / n and the gradient of the denominator.

o = num / n, so the numerator gets ``d_o / n`` and n gets ``-(d_o . o) / n``; n = den + eps, or max(abs(den), 1).
o and d_o (B, H, T, V); den, scale = 1 / n and e = the denominator's gradient (B, H, T) contiguous, with
TIMES_N the latter times n.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "rows", "eps"])
def normalizer_gradient(
    o, o_b, o_h, o_t, o_d, d_o, g_b, g_h, g_t, g_d, den, scale, e, H, T, rows, eps,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, NORMALIZER: tl.constexpr, TIMES_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    live, d = row < rows, tl.arange(0, BV)
    b, h, t = row // (H * T), (row // T) % H, row % T
    here = live[:, None] & (d < V)[None, :]
    place = (b * o_b + h * o_h + t * o_t)[:, None] + d[None, :] * o_d
    x = tl.load(o + place, mask=here, other=0.0).to(tl.float32)
    place = (b * g_b + h * g_h + t * g_t)[:, None] + d[None, :] * g_d
    g = tl.load(d_o + place, mask=here, other=0.0).to(tl.float32)
    total = tl.load(den + row, mask=live, other=1.0)
    if NORMALIZER == 1:
        inverse = 1.0 / (total + eps)
        slope = tl.full((C,), 1.0, tl.float32)
    else:
        size = tl.abs(total)
        inverse = 1.0 / tl.maximum(size, 1.0)
        slope = tl.where(size >= 1.0, tl.where(total > 0, 1.0, -1.0), 0.0)
    tl.store(scale + row, inverse, mask=live)
    found = -tl.sum(x * g, 1) * slope
    tl.store(e + row, found if TIMES_N else found * inverse, mask=live)
