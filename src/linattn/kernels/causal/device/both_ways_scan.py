# mypy: ignore-errors
"""From what each segment adds to the states to those that it starts from, in both directions, in place and in order.

gains  (2, segment places, SIZE) fp32: in, see both_ways_states; out, the state before a segment along time (first
       plane), and after it against time (second)
kepts  (segment places,) fp32
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "segment", "HS", "pieces", "plane"])
def scan_both_ways(
    gains, plane, kepts, cu, T, segment, HS, pieces,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A program has BLOCK numbers of one sequence, head and direction.
    pid = tl.program_id(0).to(tl.int64)
    e = (pid % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    ok = e < SIZE
    pid = pid // BLOCKS
    against = pid % 2
    pid = pid // 2
    hs = pid % HS
    n = pid // HS
    if PACKED:
        first = tl.load(cu + n).to(tl.int64)
        length = tl.load(cu + n + 1).to(tl.int64) - first
        piece = hs * pieces + first // segment + n
    else:
        length = n * 0 + T
        piece = pid * pieces
    count = tl.cdiv(length, segment).to(tl.int32)
    gains += against * plane
    state = tl.zeros([BLOCK], tl.float32)
    for step in tl.range(0, count, num_stages=STAGES):
        here = piece + tl.where(against == 1, count - 1 - step, step)
        gain = tl.load(gains + here * SIZE + e, mask=ok, other=0.0)
        kept = tl.load(kepts + here)
        tl.store(gains + here * SIZE + e, state, mask=ok)
        state = state * kept + gain
