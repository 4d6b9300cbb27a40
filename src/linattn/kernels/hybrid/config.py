"""Tile sizes of the kernels of hybrid attention: by shape and dtype, without measuring."""

from dataclasses import dataclass, replace

import torch

from linattn.kernels.common.support import padded

# Narrower products than this are wrong on Hopper, see docs/kernels.md.
NARROWEST = 32
# Fields of Tiles that a test or a measurement tries.
TRIAL: dict[str, int] = {}


@dataclass(frozen=True)
class Tiles:
    """Tiles of L tokens, BN chosen tokens and BF features; stages of loops over keys or queries."""

    L: int
    BN: int
    BF: int
    warps: int
    stages: int


def pick(chunk: int, K: int, V: int, F: int, dtype: torch.dtype, *, pairs: bool = False) -> Tiles:
    """Tiles that divide chunks, which are multiples of 32. pairs: whether near tokens may be linear."""
    wide = max(columns(K), columns(V))
    longest = 64 if chunk % 64 == 0 else 32
    if dtype == torch.float32:
        # Full fp32 products run outside the tensor cores, with both operands in registers: small tiles, many warps.
        tiles = Tiles(L=32, BN=32, BF=32 if wide <= 64 else 16, warps=8, stages=1)
    elif dtype == torch.float16:
        # Features and sums may leave the range of fp16: tf32 products, with operands of twice the size.
        tiles = Tiles(L=32, BN=32, BF=min(columns(F), 64), warps=4 if wide <= 64 else 8, stages=1)
    elif pairs:
        # Scores, two sums of values and the features of pairs beside each other: shorter tiles.
        tiles = Tiles(L=32, BN=64, BF=min(columns(F), 64), warps=4 if wide <= 64 else 8, stages=3)
    else:
        # Three stages: with two the next tile is requested after the work, and products wait for one another.
        tiles = Tiles(L=longest, BN=64, BF=min(columns(F), 64), warps=4 if wide <= 64 else 8, stages=3)
    return replace(tiles, **TRIAL)


def columns(width: int) -> int:
    """Columns of a tile that holds ``width`` columns."""
    return max(NARROWEST, padded(width)) if width else NARROWEST
