# mypy: ignore-errors
"""From what each segment adds to the state each segment starts from, in place and in order.

s      (rows, NSEG, SIZE) fp32: in, what a segment adds; out, the state before it (with REVERSE, after it)
keeps  (rows, NSEG) fp32: what a segment leaves of the state before it, where there is a decay
s0     (rows, SIZE) the state before the first segment, or None        s1  (rows, SIZE) after the last, or None
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["NSEG"])
def scan(
    s, keeps, s0, s1, NSEG,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, REVERSE: tl.constexpr, DECAY: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr,
):  # fmt: skip
    # A program has BLOCK numbers of one row.
    pid = tl.program_id(0).to(tl.int64)
    row = pid // BLOCKS
    e = (pid % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    ok = e < SIZE
    state = tl.zeros([BLOCK], tl.float32)
    if S0:
        state += tl.load(s0 + row * SIZE + e, mask=ok, other=0.0)
    for step in range(NSEG):
        seg = row * NSEG + (NSEG - 1 - step if REVERSE else step)
        gain = tl.load(s + seg * SIZE + e, mask=ok, other=0.0)
        tl.store(s + seg * SIZE + e, state, mask=ok)
        if DECAY:
            state = state * tl.load(keeps + seg)
        state = state + gain
    if S1:
        tl.store(s1 + row * SIZE + e, state, mask=ok)
