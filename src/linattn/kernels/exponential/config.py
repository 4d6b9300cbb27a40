"""Tile sizes of the walks of exponential attention: by shape and device, without measuring."""

from dataclasses import dataclass, replace

import torch

from linattn.kernels.causal.config import shared_memory
from linattn.kernels.common.support import multiprocessors, padded


@dataclass(frozen=True)
class Tiles:
    """Tiles of one walk: L tokens, BW columns.

    lean: 1 to do without the buffer for products that outlast their round. parts: pieces in which sums of keys are
    kept, as many as threads side by side hold tokens, so that no round sums across threads; 0: summed in each round.
    apart: 1 to make the output's row sums in a kernel of their own.
    """

    L: int
    BW: int
    warps: int
    stages: int
    lean: int = 0
    parts: int = 0
    apart: int = 0


OUTPUT, D_Q, D_K, D_V = range(4)  # walks
# Fields of Tiles that a measurement tries, by walk.
TRIAL: dict[int, dict[str, int]] = {}
# The number of segments that a test sets.
TRIAL_SEGMENTS: list[int] = []
# The shortest piece of a sequence that is worth its own state.
SHORTEST_SEGMENT = 512


def is_tried() -> bool:
    """Whether a measurement or test sets other settings than those chosen by shape."""
    return bool(TRIAL or TRIAL_SEGMENTS)


def pick(role: int, X: int, W: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """The tiles for a state of X rows and W columns. L depends only on the dtype, as all walks of a call share it."""
    BX = padded(X)
    if dtype == torch.float32:
        # Full fp32 products run outside the tensor cores, with both operands in registers: small tiles, many warps.
        tiles = Tiles(L=32, BW=min(padded(W), 32 if BX <= 128 else 16), warps=8, stages=1)
    elif dtype == torch.float16:
        # State and scores may leave the range of fp16: tf32 products, with operands of twice the size.
        tiles = Tiles(L=32, BW=min(padded(W), 64 if BX <= 128 else 32), warps=4, stages=1)
    elif BX <= 128:
        # With three stages two programs of dk, which reads four tensors, would not fit on a multiprocessor of Hopper.
        stages = 2 if BX == 128 and role == D_K else 3
        tiles = Tiles(L=64, BW=min(padded(W), 64), warps=4, stages=stages, lean=1)
        if role == OUTPUT and BX >= 64:
            tiles = replace(tiles, parts=1024 // BX)
        if role in (D_Q, D_K) and tiles.BW == 64:
            tiles = replace(tiles, parts=16)
    else:
        tiles = Tiles(L=64, BW=min(padded(W), 64), warps=8, stages=2)
    # In the walk itself row sums would be spilled, and every tile would repeat them.
    tiles = replace(tiles, apart=int(role == OUTPUT and dtype == torch.bfloat16 and BX >= 128 and W > tiles.BW))
    return _fitting(replace(tiles, **TRIAL.get(role, {})), BX, dtype, shared_memory(device))


def _fitting(tiles: Tiles, BX: int, dtype: torch.dtype, limit: int) -> Tiles:
    """The tiles with fewer stages, then narrower, until their estimate fits the shared memory of the device."""
    size = 2 if dtype == torch.bfloat16 else 4
    while True:
        # x, y, w and u of each stage; the state and the scores as operands, a tile on its way out.
        tokens = tiles.L * (2 * BX + 2 * tiles.BW) * dtype.itemsize * max(1, tiles.stages - tiles.lean)
        used = tokens + (BX * tiles.BW + tiles.L * tiles.L + tiles.L * tiles.BW) * size
        if used <= limit or tiles.BW <= 16:
            return tiles
        tiles = replace(tiles, stages=tiles.stages - 1) if tiles.stages > 1 else replace(tiles, BW=tiles.BW // 2)


def segments(T: int, programs: int, unit: int, device: torch.device) -> tuple[int, int]:
    """Tokens of a segment, in whole units, and the number of segments: one unless the device would be partly idle."""
    wanted, most = 2 * multiprocessors(device) // max(1, programs), T // SHORTEST_SEGMENT
    if TRIAL_SEGMENTS:
        wanted = most = TRIAL_SEGMENTS[0]
    length = max(1, -(-T // (max(1, min(wanted, most)) * unit))) * unit
    return length, max(1, -(-T // length))
