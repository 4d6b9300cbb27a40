"""The tiles and the number of programs for each shape in bidirectional attention."""

from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from linattn.kernels.common.support import MAP_CODES, multiprocessors, padded
from linattn.ops.maps import Twin


class Side(NamedTuple):
    """The map of the queries or of the keys: its code, and its parameters as in ``Twin``."""

    code: int
    table: Tensor | None
    token: Tensor | None
    constant: Tensor | None


class Maps(NamedTuple):
    """Maps that the kernels run themselves, on raw q and k."""

    query: Side
    key: Side
    parts: int
    flows: int


class Widths(NamedTuple):
    """Widths: channels of raw q and k; features of the map; features with the constant one; values per flow; flows."""

    D: int
    F: int
    K: int
    V: int
    flows: int

    @property
    def state(self) -> int:
        """How many numbers of a state a program holds, padded."""
        return padded(self.F) * padded(self.V)

    @property
    def part(self) -> int:
        """How many numbers one part's state has, or its tile of 64 tokens if that has more."""
        return padded(self.D) * max(64, padded(self.V))


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
    maps: Maps | None = None

    @property
    def widths(self) -> Widths:
        D, V = self.q.shape[3], self.v.shape[3]
        if self.maps is None:
            return Widths(D, D, D, V, 1)
        F = D * self.maps.parts
        return Widths(D, F, F + int(self.maps.key.constant is not None), V // self.maps.flows, self.maps.flows)


class Config(NamedTuple):
    """Tokens of a tile, warps and pipeline stages of a program; whether 16-bit states keep their remainder."""

    BT: int
    warps: int
    stages: int
    split: bool = True
    registers: int | None = None  # most registers of a thread: with fewer, more programs share a multiprocessor
    programs: int = 4  # most programs that a multiprocessor is given

    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = {"BT": self.BT, "num_warps": self.warps, "num_stages": self.stages}
        return found if self.registers is None else found | {"maxnreg": self.registers}


Kernel = Literal["gather", "read", "query_grad", "key_grad"]

SPLIT_POWER, UNIT_SILU = MAP_CODES["split_power"], MAP_CODES["unit_silu"]

# One program serves a key head with up to this many keys and twice as many queries of its group.
SHORT = 512
# A state with more numbers than this is divided among programs. The limit is lower in fp16, whose states take twice
# the memory as operands, and in fp32, whose products are unrolled.
WIDE = {torch.bfloat16: 128 * 128, torch.float16: 128 * 64, torch.float32: 32 * 32}
# A segment of fewer tiles is not worth the state that it writes and others read.
TILES_PER_SEGMENT = 8
# The cost of reading or writing a state, which each program does once, in tiles.
START = 2


def fits_one_program(x: Inputs) -> bool:
    """Whether one program per key head does everything, so that only the results are written."""
    G = x.q.shape[1] // x.k.shape[1]
    short = x.k.shape[2] <= SHORT and G * x.q.shape[2] <= 2 * SHORT
    return x.cu_seqlens is None and short and x.widths.state <= 64 * 128


def fits_programs(x: Inputs) -> bool:
    """Whether programs that share a sequence hold a whole state each."""
    return x.widths.state <= WIDE[x.q.dtype]


def can_fuse(q: Tensor, v: Tensor, maps: tuple[Twin, Twin], cu_seqlens: Tensor | None = None) -> bool:
    """Whether ``attend_all`` runs these maps itself; otherwise the features must be made before.

    q ``(B, H, Tq, D)`` raw, v ``(B, H_kv, Tk, V)``: D a power of two from 16 to 128, at most 256 features, and a state
    that one program holds.
    """
    D = q.shape[3]
    (query, key), shaped = maps, D in (16, 32, 64, 128)
    alike = (query.parts, query.flows, query.constant is None) == (key.parts, key.flows, key.constant is None)
    if not (shaped and alike and D * key.parts <= 256 and v.shape[3] % key.flows == 0):
        return False
    side = Side(0, None, None, key.constant)
    # Only the heads and the length of the keys count, and the values have the same.
    x = Inputs(q, v, v, None, cu_seqlens, None, 0, 0.0, Maps(side, side, key.parts, key.flows))
    return fits_one_program(x) or fits_programs(x)


def joins_flows(x: Inputs) -> bool:
    """Whether one program of the forward pass serves both flows of a head: they must differ only by a sign.

    Such a program has neither an initial state nor one to be stored, as these have a place for each flow.
    """
    codes = (-1, -1) if x.maps is None else (x.maps.query.code, x.maps.key.code)
    small = padded(x.widths.D) * padded(2 * x.widths.V) <= 64 * 64
    return x.widths.flows == 2 and codes == (SPLIT_POWER, SPLIT_POWER) and small and x.initial is None


def joins_gradients(x: Inputs, d_state: Tensor | None) -> bool:
    """Whether one program of the backward pass serves both flows of a head: only for 16-bit inputs with plain maps.

    The values of a flow must fill whole products: narrow products of operands computed next to them came out wrong.
    """
    plain = x.maps is not None and x.maps.query.token is None and x.maps.key.token is None and d_state is None
    whole = x.q.dtype != torch.float32 and x.widths.V % 32 == 0
    return plain and whole and joins_flows(x) and x.widths.K == x.widths.F


def joined_config(kernel: Literal["short", "query_grad", "key_grad"]) -> Config:
    """The config of programs that serve both flows backward: with a tile of queries, registers hold four states."""
    if kernel == "key_grad":
        # A third stage would leave shared memory for only one program.
        return Config(64, 4, 2)
    return Config(32, 4, 3)


def short_config(x: Inputs, backward: bool = False) -> Config:
    """The config for one program per key head."""
    wide = x.widths.part > 64 * 64
    if x.q.dtype == torch.float32:
        # Exact products are unrolled and run outside the tensor cores: small tiles keep them in registers.
        return Config(16 if backward else 32, 8 if wide else 4, 1)
    if backward:
        return Config(32 if _two_parts(x) or _takes_more(x) else 64, 8 if wide else 4, 2 if wide else 3)
    # Both flows of a head in 168 registers would spill.
    registers = None if joins_flows(x) else _registers(x)
    return Config(64, 8 if wide else 4, 2 if wide else 3, registers=registers)


def long_config(x: Inputs, kernel: Kernel) -> Config:
    """The config for programs that share a sequence."""
    wide, backward = x.widths.part > 64 * 64, kernel in ("query_grad", "key_grad")
    if x.q.dtype == torch.float32:
        return Config(16 if kernel == "query_grad" else 32, 8 if wide else 4, 2)
    if kernel == "query_grad":
        # It ran faster without a limit of registers; with what some maps hold besides, 64 tokens would spill.
        return Config(32 if _two_parts(x) or _takes_more(x) else 64, 8 if wide else 4, 2 if wide else 3)
    if backward:
        registers = 168 if x.maps is None and _registers(x) else None
        return Config(32 if _two_parts(x) else 64, 8 if wide else 4, 2 if wide else 3, registers=registers)
    # Sums for a constant feature take the remaining registers.
    crowded = kernel == "gather" and _two_parts(x) and x.widths.K > x.widths.F
    return Config(64, 8 if wide else 4, 2 if wide else 3, registers=None if crowded else _registers(x))


def _two_parts(x: Inputs) -> bool:
    """Whether programs hold two states, for which larger tiles would leave no registers in the backward pass."""
    return x.maps is not None and x.maps.parts == 2


def _takes_more(x: Inputs) -> bool:
    """Whether a map's gradients make programs hold more: sums for its parameters, or features computed again."""
    return x.maps is not None and (x.maps.query.table is not None or x.maps.query.code == UNIT_SILU)


def _registers(x: Inputs) -> int | None:
    """Registers with which four programs of four warps share a multiprocessor, or three if each holds two states."""
    if x.q.dtype != torch.bfloat16 or x.widths.part > 64 * 64:
        return None
    return 168 if _two_parts(x) else 128


def segments_for(rows: int, T: int, config: Config, device: torch.device) -> int:
    """Into how many segments a sequence is cut so that all multiprocessors have the same amount of work."""
    most = T // (TILES_PER_SEGMENT * config.BT)
    if most <= 1 or rows == 0:
        return 1
    return _segments(rows, -(-T // config.BT), most, config.programs, multiprocessors(device))


@lru_cache(1024)
def _segments(rows: int, tiles: int, most: int, programs: int, processors: int) -> int:
    """The number of segments with the least work for the busiest multiprocessor, at ``programs`` or one less there."""
    least = max(1, (programs - 1) * processors * 9 // (10 * rows))
    most = min(most, max(1, programs * processors // rows))

    def load(segments: int) -> int:
        return -(-rows * segments // processors) * (-(-tiles // segments) + START)

    return min(range(min(least, most), most + 1), key=load)


def columns_for(q: Tensor, depth: int) -> int:
    """How many columns of a state with ``depth`` rows a program holds; its tile is as large as the operands allow."""
    if q.dtype == torch.float32:
        return max(16, 64 * 64 // depth)
    return (128 if depth <= 128 else 64) // (2 if q.dtype == torch.float16 else 1)
