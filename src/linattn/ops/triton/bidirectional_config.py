"""Which tiles and how many programs serve which shapes in bidirectional attention."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.ops.triton.support import multiprocessors, padded


class Inputs(NamedTuple):
    """Strided q, k, v; key_mask (B, Tk) bool; cu_seqlens (N + 1,); flat contiguous initial state; norm 0, 1 or 2."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    initial: Tensor | None
    norm: int
    eps: float


class Config(NamedTuple):
    """Tokens of a tile, warps and pipeline stages of a program; whether bf16 states keep their remainder."""

    BT: int
    warps: int
    stages: int
    split: bool = True
    registers: int | None = None  # of a thread at most: fewer let more programs share a multiprocessor

    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = {"BT": self.BT, "num_warps": self.warps, "num_stages": self.stages}
        return found if self.registers is None else found | {"maxnreg": self.registers}


# Up to this many keys, and twice as many queries of a group, one program does a key head.
SHORT = 512
# Above this many numbers in a state its tiles are spread over programs.
WIDE = 128 * 128
PROGRAMS_PER_SM = 4
# A part of fewer tiles is not worth the state that it writes and others read.
TILES_PER_SEGMENT = 8


def fits_one_program(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether one program per key head does all: nothing is then written but the results."""
    G = q.shape[1] // k.shape[1]
    short = k.shape[2] <= SHORT and G * q.shape[2] <= 2 * SHORT
    return cu_seqlens is None and short and padded(q.shape[3]) * padded(v.shape[3]) <= 64 * 128


def saves_state(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether backward needs the state of forward, or makes it again."""
    return not fits_one_program(q, k, v, cu_seqlens)


def short_config(q: Tensor, v: Tensor, backward: bool = False) -> Config:
    """For one program per key head."""
    wide = padded(q.shape[3]) * padded(v.shape[3]) > 64 * 64
    if q.dtype == torch.float32:
        # Exact products run on the ordinary units, unrolled: small tiles keep them in registers.
        return Config(16 if backward else 32, 8 if wide else 4, 1)
    return Config(64, 8 if wide else 4, 2, registers=_registers(q, wide) if backward else None)


def long_config(q: Tensor, v: Tensor) -> Config:
    """For programs that share a sequence."""
    wide = padded(q.shape[3]) * padded(v.shape[3]) > 64 * 64
    if q.dtype == torch.float32:
        return Config(32, 8 if wide else 4, 2)
    return Config(64, 8 if wide else 4, 2 if wide else 3, registers=_registers(q, wide))


def _registers(q: Tensor, wide: bool) -> int | None:
    """With 168 three programs of four warps share a multiprocessor; bf16 programs need hardly more."""
    return 168 if q.dtype == torch.bfloat16 and not wide else None


def segments_for(rows: int, T: int, BT: int, device: torch.device) -> int:
    """Into how many parts a sequence is cut so that a few programs run on every multiprocessor."""
    wanted = -(-PROGRAMS_PER_SM * multiprocessors(device) // max(rows, 1))
    return max(1, min(wanted, T // (TILES_PER_SEGMENT * BT)))


def columns_for(q: Tensor, depth: int) -> int:
    """Columns of a state of so many rows that a program holds: less for fp32, whose products are unrolled."""
    if q.dtype == torch.float32:
        return max(16, 64 * 64 // depth)
    return 128 if depth <= 128 else 64
