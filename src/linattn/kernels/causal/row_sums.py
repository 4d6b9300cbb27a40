"""Row sums of causal and exponential attention in kernels of their own: their launches."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.kernels.causal.config import row_tiles
from linattn.kernels.common.support import interpreted, known_stride

Launch = Callable[..., None]
# Number of rows of one program of row_factors.
BLOCK = 512


class Walk(NamedTuple):
    """One direction of row sums: how a sequence is cut, and the factors of sums. See the kernel of row sums."""

    cut: tuple[int, int, int]  # tokens of a chunk, tokens of a segment, segments
    chunks: int  # places of a row in keeps or spans
    gate: int = 0
    gates: Tensor | None = None
    keeps: Tensor | None = None
    spans: Tensor | None = None
    start: Tensor | None = None
    last: Tensor | None = None  # to be written
    against: bool = False


def row_sums(launch: Launch, q: Tensor, k: Tensor, walk: Walk, *, key_mask: Tensor | None, cu: Tensor | None) -> Tensor:
    """The row sums of mild walks, in parts (parts, B, H, T) and without the factors of rows."""
    from linattn.kernels.causal.device import row_sums as kernels

    (B, H, T, K), HS = q.shape, k.shape[1]
    N = B if cu is None else cu.shape[0] - 1
    L, segment, NSEG = walk.cut
    tiles = row_tiles(K, L)
    count = -(-K // tiles.BW)
    parts = torch.empty(count, B, H, T, dtype=torch.float32, device=q.device)
    launch(
        kernels.row_sums, N * H * NSEG * count, q, *q.stride(), k, *k.stride(), parts, parts.stride(0),
        walk.gates, walk.keeps, walk.spans, key_mask, 0 if key_mask is None else key_mask.stride(0), cu,
        walk.start, walk.last, T, segment, NSEG, H, HS, walk.chunks,
        K=K, BK=tiles.BW, PARTS=count, L=L, LONG=tiles.parts, DIV=H // HS, REVERSE=walk.against, GATE=walk.gate,
        PACKED=cu is not None, MASK=key_mask is not None, Z0=walk.start is not None, Z1=walk.last is not None,
        EVEN=cu is None and T % L == 0, Q_T=known_stride(q), K_T=known_stride(k),
        BF16=q.dtype == torch.bfloat16 and not interpreted(),
        STAGES=tiles.stages, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return parts


def row_factors(
    launch: Launch, sums: Tensor, walks: list[Walk], parts: list[Tensor], heads: int, *, norm: int, eps: float
) -> Tensor:
    """1 / n (B, H, T), and the row sums in place; with a second walk, against time, its own row sums follow.

    heads: number of key heads.
    """
    from linattn.kernels.causal.device import row_factors as kernels

    count, B, H, T = parts[0].shape
    factors = torch.empty(B, H, T, dtype=torch.float32, device=sums.device)
    other, turned = (None, None) if len(walks) == 1 else (parts[1], walks[1].gates)
    launch(
        kernels.row_factors, -(-factors.numel() // BLOCK), parts[0], other, parts[0].stride(0), walks[0].gates, turned,
        sums, factors, T, H, heads, factors.numel(), eps,
        PARTS=count, DIV=H // heads, GATE=walks[0].gate, BOTH=other is not None, NORM=norm, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return factors
