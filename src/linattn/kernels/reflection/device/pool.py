# mypy: ignore-errors
"""Means and variances over a sequence from those of its segments, always in the same order."""

import triton
import triton.language as tl


@triton.jit
def _first_moment(
    moments, counts, b, head, segments, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr
):
    """Sum over the real tokens of one head, (BD,), and their number."""
    channel = tl.arange(0, BD)
    total, number = tl.zeros((BN, BD), tl.float32), tl.zeros((BN,), tl.float32)
    for start in range(0, segments, BN):
        segment = start + tl.arange(0, BN)
        count = tl.load(counts + b * segments + segment, mask=segment < segments, other=0.0)
        at = moments + ((b * segments + segment)[:, None] * (2 * H) + head) * D + channel[None, :]
        total += count[:, None] * tl.load(at, mask=(segment < segments)[:, None] & (channel < D)[None, :], other=0.0)
        number += count
    return tl.sum(total, 0), tl.sum(number, 0)


@triton.jit
def _second_moment(
    moments, counts, center, b, head, segments,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sum of the squares about ``center``, (BD,)."""
    channel = tl.arange(0, BD)
    total = tl.zeros((BN, BD), tl.float32)
    for start in range(0, segments, BN):
        segment = start + tl.arange(0, BN)
        count = tl.load(counts + b * segments + segment, mask=segment < segments, other=0.0)
        at = moments + ((b * segments + segment)[:, None] * (2 * H) + head) * D + channel[None, :]
        there = (segment < segments)[:, None] & (channel < D)[None, :]
        away = tl.load(at, mask=there, other=0.0) - center[None, :]
        total += tl.load(at + H * D, mask=there, other=0.0) + count[:, None] * away * away
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["segments_q", "segments_k"])
def pool_moments(
    moments_q, moments_k, counts_q, counts_k, center, inverse, variance, segments_q, segments_k,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program merges a key head with the GROUP query heads that share it, segment by segment.

    moments (B, segments, 2, H or H_kv, D), counts (B, segments) -> center (B, H_kv, D), inverse (B, H_kv), variance
    (B, H_kv, D/2), the mean of the two channels of a pair.
    """
    G: tl.constexpr = H // GROUP
    program = tl.program_id(0).to(tl.int64)
    b, g = program // G, program % G
    channel = tl.arange(0, BD)
    total, number_k = _first_moment(moments_k, counts_k, b, g, segments_k, G, D, BD, BN)
    number_q = 0.0
    for member in tl.static_range(GROUP):
        more, number_q = _first_moment(moments_q, counts_q, b, g * GROUP + member, segments_q, H, D, BD, BN)
        total += more
    # Where nothing is real a count of 1 stands for it, as in plain PyTorch.
    share = 1.0 / (tl.maximum(number_k, 1.0) + GROUP * tl.maximum(number_q, 1.0))
    mean = total * share
    squares = _second_moment(moments_k, counts_k, mean, b, g, segments_k, G, D, BD, BN)
    for member in tl.static_range(GROUP):
        squares += _second_moment(moments_q, counts_q, mean, b, g * GROUP + member, segments_q, H, D, BD, BN)
    tl.store(center + program * D + channel, mean, mask=channel < D)
    tl.store(inverse + program, share)
    squares = tl.where(channel < D, squares, 0.0)
    pair = tl.arange(0, BD // 2)
    both = tl.sum(tl.reshape(squares, (BD // 2, 2)), 1)
    tl.store(variance + program * (D // 2) + pair, both * (0.5 * share), mask=pair < D // 2)
