# mypy: ignore-errors
"""total = initial + the partial states of all segments, in their order, with the rounding errors carried along (Kahan).

partial (segments, M) contiguous fp32, initial and total (M,) contiguous fp32. Grid: blocks of M.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M", "segments"])
def bidirectional_sum(partial, initial, total, M, segments, HAS_INITIAL: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < M
    x, lost = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    if HAS_INITIAL:
        x = tl.load(initial + i, mask=inside, other=0.0)
    for segment in range(0, segments):
        new = tl.load(partial + tl.cast(segment, tl.int64) * M + i, mask=inside, other=0.0) - lost
        longer = x + new
        lost = (longer - x) - new
        x = longer
    tl.store(total + i, x, mask=inside)
