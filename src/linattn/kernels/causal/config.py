"""Tile sizes of the causal kernels and how a sequence is cut into segments: by shape and device, without measuring."""

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch

from linattn.kernels.common.support import multiprocessors, padded

# The shortest piece of a sequence that is worth its own state.
SHORTEST_SEGMENT = 512


@dataclass(frozen=True)
class Config:
    """Tiles of one sweep: L tokens in a chunk, BW columns in a tile; programs that one multiprocessor holds at once.

    lean: 1 to do without the buffer for products that outlast their round. parts: pieces in which the sum of keys is
    kept, so that no round sums across threads and q is multiplied with it in a matrix product; 0: summed in registers.
    apart: 1 to make the output's row sums in their own kernel ("rows": BW features, parts tokens one after another).
    """

    L: int
    BW: int
    warps: int
    stages: int
    per_sm: int = 1
    lean: int = 0
    parts: int = 0
    apart: int = 0


# How fp32 inputs multiply: "ieee" outside the tensor cores, or "tf32x3", three products of parts inside them.
FP32_PRODUCTS = "ieee"
# Fields of Config that a measurement tries, by role ("output", "dq", "dk", "dv", "states", "rows").
TRIAL: dict[str, dict[str, int]] = {}
# The settings that are compared on a GPU in bf16.
CANDIDATES: dict[int, tuple[dict[str, int], ...]] = {
    64: (
        {"BW": 64, "warps": 4, "stages": 2, "lean": 0, "parts": 0},
        {"BW": 64, "warps": 4, "stages": 3, "lean": 0, "parts": 0},
        {"BW": 64, "warps": 4, "stages": 3, "lean": 1, "parts": 0},
        {"BW": 64, "warps": 4, "stages": 3, "lean": 1, "parts": 8},
    ),
    128: (
        {"BW": 64, "warps": 4, "stages": 2, "lean": 0, "parts": 0},
        {"BW": 64, "warps": 4, "stages": 3, "lean": 0, "parts": 0},
        {"BW": 64, "warps": 4, "stages": 2, "lean": 1, "parts": 8},
        {"BW": 64, "warps": 4, "stages": 3, "lean": 1, "parts": 8, "apart": 0},
        {"BW": 64, "warps": 4, "stages": 3, "lean": 1, "parts": 8, "apart": 1},
    ),
    256: (
        {"BW": 64, "warps": 8, "stages": 2, "apart": 0},
        {"BW": 64, "warps": 8, "stages": 2, "apart": 1},
        {"BW": 32, "warps": 8, "stages": 2},
    ),
}
# The number of segments that a test sets.
TRIAL_SEGMENTS: list[int] = []


def is_tried() -> bool:
    """Whether a measurement or test sets other settings than those chosen by shape."""
    return bool(TRIAL or TRIAL_SEGMENTS)


def pick(
    role: str, X: int, W: int, dtype: torch.dtype, device: torch.device, *,
    decay: bool = False, dots: bool = False, tf32: bool = False,
) -> Config:  # fmt: skip
    """The tiles for a state of X rows and W columns. L depends only on the dtype, as all sweeps of a call share it.

    dots: whether the sweep makes the dots of a gate's gradient, for which bf16 multiplies in two parts. tf32: whether
    fp32 multiplies in tf32.
    """
    if role in TRIAL:
        config = replace(_preferred(role, X, W, dtype, decay, dots, tf32), **TRIAL[role])
        return _fitting(config, padded(X), dtype, shared_memory(device))
    return _usual(role, X, W, dtype, decay, dots, tf32, shared_memory(device))


@lru_cache(1024)
def _usual(
    role: str, X: int, W: int, dtype: torch.dtype, decay: bool, dots: bool, tf32: bool, limit: int
) -> Config:  # fmt: skip
    """``pick`` without trial settings, cached because every launch asks."""
    return _fitting(_preferred(role, X, W, dtype, decay, dots, tf32), padded(X), dtype, limit)


def _preferred(role: str, X: int, W: int, dtype: torch.dtype, decay: bool, dots: bool, tf32: bool) -> Config:
    """The tiles wanted, whether or not they fit the shared memory of the device."""
    BX, wide = padded(X), max(padded(X), padded(W))
    if dtype == torch.float32 and not tf32:
        # Full fp32 products run outside the tensor cores, with both operands in registers: small tiles, many warps.
        config = Config(L=32, BW=min(padded(W), 32 if BX <= 128 else 16), warps=8, stages=1, per_sm=1)
    elif dtype != torch.bfloat16:
        # State and scores may leave the range of fp16: tf32 products, with operands of twice the size; fp32 as well.
        # The gradients of a learned decay multiply in three parts: a program has a multiprocessor to itself.
        # So has a state of 128 in fp32: with fewer warps 350 bytes of a thread were spilled.
        warps = 8 if (decay and role in ("dq", "dk")) or (tf32 and BX >= 128) else 4
        narrow = BX > 128 or (tf32 and dots and BX == 128)
        config = Config(L=32, BW=min(padded(W), 32 if narrow else 64), warps=warps, stages=1, per_sm=2)
    # Three stages: with two the compiler requests the next chunk at the end of one and waits for it at once.
    elif wide <= 64:
        # Lean with a decay: otherwise its gradients would leave no room for a second program.
        config = Config(L=64, BW=padded(W), warps=4, stages=3, per_sm=2, lean=int(decay))
    elif BX <= 128 and role == "states":
        config = Config(L=64, BW=min(padded(W), 128), warps=8, stages=3, per_sm=1)
    elif BX <= 128:
        # 64 columns: two programs are faster than one with twice the state, as two on a multiprocessor hide each
        # other's work between the products. If lean, three stages leave room for both. With products in two parts,
        # which leave no register free, one stage is fastest: what is loaded ahead is spilled, 200 bytes of a thread
        # instead of 50.
        stages = 1 if dots else 2 if decay and role in ("dq", "dk") else 3
        parts = 8 if BX == 128 and not decay else 0
        config = Config(L=64, BW=min(padded(W), 64), warps=4, stages=stages, per_sm=2, lean=1, parts=parts)
    else:
        config = Config(L=64, BW=min(padded(W), 64), warps=8, stages=2, per_sm=1)
    # In the walk itself row sums would be spilled, as the state leaves no registers, and every tile would repeat them.
    apart = role == "output" and dtype == torch.bfloat16 and BX >= 128 and W > config.BW
    return replace(config, apart=int(apart))


def row_tiles(K: int, L: int) -> Config:
    """Tiles of row sums: one warp, with no other to wait for; its lanes are L / parts strips of tokens by features."""
    if padded(K) >= 64 and L >= 64:
        config = Config(L=L, BW=64, warps=1, stages=3, parts=16)
    else:
        config = Config(L=L, BW=min(padded(K), 32), warps=1, stages=4, parts=8)
    return replace(config, **TRIAL.get("rows", {}))


def _fitting(config: Config, BX: int, dtype: torch.dtype, limit: int) -> Config:
    """The config with fewer stages, then a narrower tile, until its estimate fits the shared memory of the device."""
    size = 2 if dtype == torch.bfloat16 else 4
    while True:
        # x, y and w of each stage; the state and the scores as operands, a tile on its way out.
        tokens = config.L * (2 * BX + config.BW) * dtype.itemsize * max(1, config.stages - config.lean)
        used = tokens + (BX * config.BW + config.L * config.L + config.L * config.BW) * size
        used += BX * config.L * size if config.parts else 0
        if used <= limit or config.BW <= 16:
            return config
        less = {"stages": config.stages - 1} if config.stages > 1 else {"BW": config.BW // 2}
        config = replace(config, **less)


def segments(T: int, programs: int, config: Config, unit: int, device: torch.device) -> tuple[int, int]:
    """Tokens of a segment, in whole units, and the number of segments: one unless the device would be partly idle."""
    wanted = config.per_sm * multiprocessors(device) // max(1, programs)
    most = T // SHORTEST_SEGMENT
    if TRIAL_SEGMENTS:
        wanted = most = TRIAL_SEGMENTS[0]
    count = max(1, min(wanted, most))
    length = max(1, -(-T // (count * unit))) * unit
    return length, max(1, -(-T // length))


@cache
def shared_memory(device: torch.device) -> int:
    """How many bytes of shared memory one program may have."""
    if device.type == "cpu":
        return 232448
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
