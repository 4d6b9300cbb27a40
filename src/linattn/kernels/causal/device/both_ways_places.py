# mypy: ignore-errors
"""Where the chunks and segments of a sequence lie; those of packed sequences have places of their own."""

import triton
import triton.language as tl


@triton.jit
def segment_of(n, hs, seg, cu, T, segment, HS, chunks, pieces, L: tl.constexpr, PACKED: tl.constexpr):
    """Row of the batch, first token and the one after the last, place of the first chunk, place of the segment."""
    if PACKED:
        b = n * 0
        first = tl.load(cu + n).to(tl.int64)
        last = tl.load(cu + n + 1).to(tl.int64)
        place0 = hs * chunks + first // L + n
        piece = hs * pieces + first // segment + n + seg
    else:
        b = n
        first = n * 0
        last = first + T
        place0 = (n * HS + hs) * chunks
        piece = (n * HS + hs) * pieces + seg
    place0 += (seg * segment) // L
    start = first + seg * segment
    end = tl.minimum(start + segment, last)
    return b, start, end, place0, piece
