"""Tile sizes of the causal kernels and how a sequence is cut into segments: by shape and device, without measuring."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from linattn.ops.triton.support import multiprocessors, padded

# Shortest piece of a sequence that is worth a state of its own.
SHORTEST_SEGMENT = 512


@dataclass(frozen=True)
class Config:
    """Of one sweep: L tokens in a chunk, BW columns in a tile; programs that one multiprocessor holds at once."""

    L: int
    BW: int
    warps: int
    stages: int
    per_sm: int = 1


# How fp32 inputs multiply: "ieee" outside the tensor cores, or "tf32x3", three products of parts inside them.
FP32_PRODUCTS = "ieee"
# What a measurement wants to try, by role ("output", "dq", "dk", "dv", "states"): fields of Config.
TRIAL: dict[str, dict[str, int]] = {}
# What a GPU is asked to compare in bf16. Without a decay and a normaliser none spills more than a few registers.
CANDIDATES: dict[int, tuple[dict[str, int], ...]] = {
    64: tuple({"BW": 64, "warps": 4, "stages": stages} for stages in (2, 3)),
    128: (
        {"BW": 128, "warps": 8, "stages": 3},
        {"BW": 64, "warps": 4, "stages": 2},
        {"BW": 64, "warps": 4, "stages": 3},
    ),
    256: (
        {"BW": 64, "warps": 8, "stages": 2},
        {"BW": 32, "warps": 8, "stages": 2},
    ),
}
# The number of segments a test wants to see.
TRIAL_SEGMENTS: list[int] = []


def pick(role: str, X: int, W: int, dtype: torch.dtype, device: torch.device, *, plain: bool = True) -> Config:
    """For a state of X rows and W columns. The chunk's length goes by dtype alone: all sweeps of a call share it.

    plain: neither a decay nor a normaliser, so that operands go from memory into products as they are.
    """
    BX, wide = padded(X), max(padded(X), padded(W))
    if dtype == torch.float32:
        # Full fp32 products run outside the tensor cores, with both operands in registers: small tiles, many warps.
        config = Config(L=32, BW=min(padded(W), 32 if BX <= 128 else 16), warps=8, stages=1, per_sm=1)
    elif dtype == torch.float16:
        # State and scores may leave the range of fp16: tf32 products, with operands of twice the size.
        config = Config(L=32, BW=min(padded(W), 64 if BX <= 128 else 32), warps=4, stages=1, per_sm=2)
    # Three stages: with two the compiler asks for the next chunk at the end of one and waits for it at once.
    elif wide <= 64:
        config = Config(L=64, BW=padded(W), warps=4, stages=3, per_sm=2)
    elif BX <= 128 and role == "states":
        config = Config(L=64, BW=min(padded(W), 128), warps=8, stages=3, per_sm=1)
    elif BX <= 128:
        # 64 columns: two programs beat one with twice the state. With work between the products two at a time on a
        # multiprocessor hide it, for which two stages leave room; without, the third stage is worth more.
        config = Config(L=64, BW=min(padded(W), 64), warps=4, stages=3 if plain else 2, per_sm=2)
    else:
        config = Config(L=64, BW=min(padded(W), 64), warps=8, stages=2, per_sm=1)
    config = replace(config, **TRIAL.get(role, {}))
    return _fitting(config, BX, dtype, shared_memory(device))


def _fitting(config: Config, BX: int, dtype: torch.dtype, limit: int) -> Config:
    """Fewer stages, then a narrower tile, until the estimate is inside the shared memory of the device."""
    size = 2 if dtype == torch.bfloat16 else 4
    while True:
        # x, y and w of each stage; the state and the scores as operands, a tile on its way out.
        tokens = config.L * (2 * BX + config.BW) * dtype.itemsize * config.stages
        used = tokens + (BX * config.BW + config.L * config.L + config.L * config.BW) * size
        if used <= limit or config.BW <= 16:
            return config
        less = {"stages": config.stages - 1} if config.stages > 1 else {"BW": config.BW // 2}
        config = replace(config, **less)


def segments(T: int, programs: int, config: Config, unit: int, device: torch.device) -> tuple[int, int]:
    """Tokens of a segment, in whole units, and how many there are: one, unless the device would be left idle."""
    wanted = config.per_sm * multiprocessors(device) // max(1, programs)
    most = T // SHORTEST_SEGMENT
    if TRIAL_SEGMENTS:
        wanted = most = TRIAL_SEGMENTS[0]
    count = max(1, min(wanted, most))
    length = max(1, -(-T // (count * unit))) * unit
    return length, max(1, -(-T // length))


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes one program may have."""
    if device.type == "cpu":
        return 232448
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
