"""Attention whose weights decay with the distance in both directions: the forward pass in one walk over the sequence.

The steps are the gates of all chunks, the states of all segments in both directions (k and v read once), a scan over
segments, and the outputs of both directions together (q, k and v read once). The backward pass walks twice in each
direction, see ``library``.
"""

import torch
from torch import Tensor

from linattn.kernels.causal.config import TRIAL_SEGMENTS
from linattn.kernels.causal.passes import Passes
from linattn.kernels.common.launching import launch
from linattn.kernels.common.layout import like_tokens, side_by_side
from linattn.kernels.common.support import interpreted, known_stride, multiprocessors, padded

# With 128 features, states and products leave no room for a second program: it took 1.8 times as long as two sweeps.
WIDEST = 64
# Chunks whose gates one program makes.
CHUNKS = 8
# Tokens of a chunk: with twice as many it keeps half the states between chunks, but took 5.4 instead of 3.5 floors.
L = 64
# Most and fewest tokens of a segment: a longer one has fewer states to scan and leaves fewer programs.
LONGEST, SHORTEST = 2048, 512
WARPS, STAGES = 4, 3


def serves(p: Passes) -> bool:
    """Whether this pass serves: bf16, a decay, keys without weights, up to 64 features. Two sweeps do all the rest."""
    if p.q.dtype != torch.bfloat16 or max(p.sizes[4:]) > WIDEST:
        return False
    return p.log_decay is not None and p.log_input is None


def segment_length(p: Passes) -> int:
    """Tokens of a segment: as many as leave a few programs for every multiprocessor."""
    N, H, _, T, _, _ = p.sizes
    if TRIAL_SEGMENTS:
        return -(-T // (TRIAL_SEGMENTS[0] * L)) * L
    length = LONGEST
    while length > SHORTEST and N * H * -(-T // length) < 5 * multiprocessors(p.q.device):
        length //= 2
    return length


def attend(p: Passes, tokens: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Output ``(B, H, T, V)``, and with a normaliser the row sums ``(2, B, H, T)``: of all keys, and of later keys.

    tokens: q as it was given, whose memory order the output has.
    """
    from linattn.kernels.causal.device.both_ways_gates import gates_both_ways
    from linattn.kernels.causal.device.both_ways_output import outputs_both_ways
    from linattn.kernels.causal.device.both_ways_scan import scan_both_ways
    from linattn.kernels.causal.device.both_ways_states import states_both_ways

    segment = segment_length(p)
    N, H, HS, T, K, V = p.sizes
    q, k, v, a, mask, cu = p.q, p.k, p.v, p.log_decay, p.key_mask, p.cu
    assert a is not None
    B, NSEG, normalised, packed = q.shape[0], -(-T // segment), p.norm > 0, cu is not None
    # Every chunk and every segment of packed sequences has its own place, without counting the earlier ones.
    chunks, pieces = (T // L + N + 1, T // segment + N + 1) if packed else (-(-T // L), NSEG)
    bf16 = not interpreted()  # the interpreter multiplies the bits of bf16 as integers

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    if a.ndim == 1:
        a = a[None, :, None].expand(B, HS, T)
    places = B * HS * chunks
    gates, totals, tails = new(2, places, L), new(places), new(places)
    blocks = -(-T // (L * CHUNKS))
    launch(
        gates_both_ways, N * HS * blocks, a, *a.stride(), gates, gates.stride(0), totals, cu, T, HS, blocks, chunks,
        L=L, CHUNKS=CHUNKS, KEY_INDEX=p.key_index, PACKED=packed, num_warps=4,
    )  # fmt: skip
    size = K * V + K
    gains, kepts = new(2, B * HS * pieces, size), new(B * HS * pieces)
    behind = new(places, K, V, dtype=torch.bfloat16 if bf16 else torch.float32)
    sums = new(2, places, K) if normalised else None
    sums_at = (sums, 0 if sums is None else sums.stride(0))
    mask_at = (mask, 0 if mask is None else mask.stride(0))
    common = {
        "K": K, "V": V, "BK": padded(K), "BW": padded(V), "L": L, "PACKED": packed, "MASK": mask is not None,
        "K_T": known_stride(k), "V_T": known_stride(v), "BF16": bf16,
        "STAGES": STAGES, "num_warps": WARPS, "num_stages": STAGES,
    }  # fmt: skip
    launch(
        states_both_ways, N * HS * NSEG, k, *k.stride(), v, *v.stride(), gates, gates.stride(0), totals,
        *mask_at, cu, gains, gains.stride(0), kepts, behind, *sums_at, tails, T, segment, NSEG, HS, chunks, pieces,
        SUMS=normalised, **common,
    )  # fmt: skip
    if NSEG > 1:
        block = min(512, padded(size))
        count = -(-size // block)
        launch(
            scan_both_ways, 2 * N * HS * count, gains, gains.stride(0), kepts, cu, T, segment, HS, pieces,
            SIZE=size, BLOCK=block, BLOCKS=count, PACKED=packed, STAGES=4, num_warps=4,
        )  # fmt: skip
    out = like_tokens(tokens, V, out_dtype)
    den = new(2, B, H, T) if normalised else None
    launch(
        outputs_both_ways, N * H * NSEG, q, *q.stride(), k, *k.stride(), v, *v.stride(), out,
        den, 0 if den is None else den.stride(0), gates, gates.stride(0), totals, *mask_at, cu,
        gains, gains.stride(0), behind, *sums_at, tails, T, segment, NSEG, H, HS, chunks, pieces, p.eps,
        DIV=H // HS, NORM=p.norm, STARTS=NSEG > 1, Q_T=known_stride(q), SIDE_BY_SIDE=side_by_side(out), **common,
    )  # fmt: skip
    return out, den
