"""Attention whose weights decay with the distance in both directions: the forward pass in one walk over the sequence.

Gates of all chunks, states of all segments in both directions (k and v read once), a scan over segments, and outputs of
both directions together (q, k and v read once). Backward walks twice each way, see ``library``.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from linattn.ops.triton.causal import passes as causal_passes
from linattn.ops.triton.causal.config import TRIAL_SEGMENTS
from linattn.ops.triton.causal.passes import Passes
from linattn.ops.triton.support import interpreted, known_stride, multiprocessors, padded

# At 128 features states and products leave no room for a second program: 1.8 times as long as two sweeps.
WIDEST = 64
# Chunks whose gates one program makes.
CHUNKS = 8


@dataclass(frozen=True)
class Config:
    """L tokens in a chunk, BW columns in a tile, at most segment tokens in a segment; warps and stages of two kernels.

    A longer chunk keeps fewer states between chunks and multiplies more; a longer segment has fewer states to scan and
    leaves fewer programs. lean: 1 to do without the buffer for products that outlast their round. regs: the most
    registers of a thread, 0 for what the compiler takes.
    """

    L: int = 64
    BW: int = 64
    segment: int = 2048
    warps: int = 4
    stages: int = 3
    lean: int = 1
    regs: int = 0
    state_warps: int = 4
    state_stages: int = 3
    state_regs: int = 0


# What a measurement wants to try: fields of Config. "off" for the two sweeps of before.
TRIAL: dict[str, int] = {}
# What a GPU is asked to compare at 64 features.
CANDIDATES: tuple[dict[str, int], ...] = (
    {"L": 64, "segment": 2048},
    {"L": 64, "segment": 1024},
    {"L": 64, "state_regs": 168},
    {"L": 128, "warps": 8, "state_warps": 8, "stages": 3, "state_stages": 2},
    {"L": 128, "warps": 8, "state_warps": 4, "stages": 2, "state_stages": 2},
    {"L": 128, "warps": 8, "state_warps": 8, "stages": 2, "state_stages": 2, "segment": 1024},
)


def serves(p: Passes) -> bool:
    """bf16, a decay, keys without weights, up to 64 features: what else there is, two sweeps do."""
    if "off" in TRIAL or p.q.dtype != torch.bfloat16 or max(p.sizes[4:]) > WIDEST:
        return False
    return p.log_decay is not None and p.log_input is None


def pick(p: Passes) -> Config:
    """Segments as long as leaves every multiprocessor a few programs, of 512 tokens at the least."""
    N, H, _, T, _, V = p.sizes
    config = replace(Config(), BW=min(64, padded(V)))
    programs, segment = N * H * -(-V // config.BW), config.segment
    while segment > 512 and programs * -(-T // segment) < 5 * multiprocessors(p.q.device):
        segment //= 2
    config = replace(replace(config, segment=segment), **TRIAL)
    if TRIAL_SEGMENTS:
        config = replace(config, segment=-(-T // (TRIAL_SEGMENTS[0] * config.L)) * config.L)
    return config


def attend(p: Passes, out_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Output ``(B, H, T, V)``, and with a normaliser the row sums ``(2, B, H, T)``: of both ways, of later keys."""
    from linattn.ops.triton.causal.kernels.both_ways_gates import gates_both_ways
    from linattn.ops.triton.causal.kernels.both_ways_output import outputs_both_ways
    from linattn.ops.triton.causal.kernels.both_ways_scan import scan_both_ways
    from linattn.ops.triton.causal.kernels.both_ways_states import states_both_ways

    launch, config = causal_passes._launch, pick(p)
    N, H, HS, T, K, V = p.sizes
    q, k, v, a, mask, cu = p.q, p.k, p.v, p.log_decay, p.key_mask, p.cu
    assert a is not None
    B, L, segment, normalised, packed = q.shape[0], config.L, config.segment, p.norm > 0, cu is not None
    NSEG, tiles, BK = -(-T // segment), -(-V // config.BW), padded(K)
    # Every chunk, and every segment, of packed sequences has a place that nobody needs to count for.
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
        "K": K, "V": V, "BK": BK, "BW": config.BW, "L": L, "TILES": tiles, "PACKED": packed, "MASK": mask is not None,
        "K_T": known_stride(k), "V_T": known_stride(v), "BF16": bf16,
    }  # fmt: skip
    launch(
        states_both_ways, N * HS * NSEG * tiles, k, *k.stride(), v, *v.stride(), gates, gates.stride(0), totals,
        *mask_at, cu, gains, gains.stride(0), kepts, behind, *sums_at, tails, T, segment, NSEG, HS, chunks, pieces,
        SUMS=normalised, STAGES=config.state_stages, num_warps=config.state_warps, num_stages=config.state_stages,
        **common, **_at_most(config.state_regs),
    )  # fmt: skip
    if NSEG > 1:
        block = min(512, padded(size))
        count = -(-size // block)
        launch(
            scan_both_ways, 2 * N * HS * count, gains, gains.stride(0), kepts, cu, T, segment, HS, pieces,
            SIZE=size, BLOCK=block, BLOCKS=count, PACKED=packed, STAGES=4, num_warps=4,
        )  # fmt: skip
    out = new(B, H, T, V, dtype=out_dtype)
    den = new(2, B, H, T) if normalised else None
    launch(
        outputs_both_ways, N * H * NSEG * tiles, q, *q.stride(), k, *k.stride(), v, *v.stride(), out,
        den, 0 if den is None else den.stride(0), gates, gates.stride(0), totals, *mask_at, cu,
        gains, gains.stride(0), behind, *sums_at, tails, T, segment, NSEG, H, HS, chunks, pieces, p.eps,
        DIV=H // HS, NORM=p.norm, STARTS=NSEG > 1, Q_T=known_stride(q), STAGES=config.stages,
        LEAN=config.lean > 0 and bf16, num_warps=config.warps, num_stages=config.stages, **common,
        **_at_most(config.regs),
    )  # fmt: skip
    return out, den


def _at_most(registers: int) -> dict[str, int]:
    return {"maxnreg": registers} if registers else {}
