# mypy: ignore-errors
"""The running maximum of exponential gates and what it makes of them, in one pass over each sequence and head.

    m_t = max(m_{t-1} + f_t, i_t)      decay_t = f_t + m_{t-1} - m_t <= 0      gain_t = i_t - m_t <= 0

i, f         (B, H, T) log input and log decay, any strides     start  (N, H) fp64, m before the first token, or None
decay, gain  (B, H, T) fp32, at least STRONGEST                 scale  (B, H, T) fp64, m    last  (N, H) the last m

The maps m -> max(m + a, b) compose into maps of the same kind: a block of tokens is one scan of pairs (a, b). The
maximum before each token is a scan of the pairs one token earlier, so that no number crosses threads through memory.
Everything is fp64: gates are few, and their sums cancel.
"""

import triton
import triton.language as tl


@triton.jit
def compose(a, b, later_a, later_b):
    return a + later_a, tl.maximum(b + later_a, later_b)


@triton.jit(do_not_specialize=["T", "H"])
def running_gates(
    i, i_b, i_h, i_t, f, f_b, f_h, f_t, cu, start, decay, gain, scale, last, T, H,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, START: tl.constexpr, STRONGEST: tl.constexpr,
):  # fmt: skip
    # A program has one sequence and head.
    pid = tl.program_id(0).to(tl.int64)
    n = pid // H
    h = pid % H
    if PACKED:
        b = n * 0
        first = tl.load(cu + n).to(tl.int64)
        end = tl.load(cu + n + 1).to(tl.int64)
    else:
        b = n
        first = n * 0
        end = first + T
    nothing = float("-inf")
    m = tl.full([], float("-inf"), tl.float64)
    if START:
        m = tl.load(start + n * H + h)
    i += b * i_b + h * i_h
    f += b * f_b + h * f_h
    row = (b * H + h) * T
    j = tl.arange(0, BLOCK)
    for t0 in range(first, end, BLOCK):
        t = t0 + j
        ok = t < end
        it = tl.load(i + t * i_t, mask=ok, other=nothing).to(tl.float64)
        ft = tl.load(f + t * f_t, mask=ok, other=0.0).to(tl.float64)
        sums, best = tl.associative_scan((ft, it), 0, compose)
        mt = tl.maximum(m + sums, best)
        earlier = ok & (j > 0)
        i_before = tl.load(i + (t - 1) * i_t, mask=earlier, other=nothing).to(tl.float64)
        f_before = tl.load(f + (t - 1) * f_t, mask=earlier, other=0.0).to(tl.float64)
        sums, best = tl.associative_scan((f_before, i_before), 0, compose)
        before = tl.maximum(m + sums, best)
        # Two scans may round differently: the decay must not come out above 0.
        g = tl.maximum(tl.minimum(ft + (before - mt), 0.0), STRONGEST)
        g = tl.where(mt == nothing, STRONGEST, g)  # everything was forgotten
        g = tl.where(before == nothing, 0.0, g)  # nothing there to decay
        e = tl.where(it == nothing, STRONGEST, tl.maximum(tl.minimum(it - mt, 0.0), STRONGEST))
        tl.store(decay + row + t, g.to(tl.float32), mask=ok)
        tl.store(gain + row + t, e.to(tl.float32), mask=ok)
        tl.store(scale + row + t, mt, mask=ok)
        m = tl.max(tl.where(t == tl.minimum(t0 + BLOCK, end) - 1, mt, nothing), axis=0)
    tl.store(last + n * H + h, m)
