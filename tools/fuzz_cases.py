"""Random calls of the public operators, for tools/fuzz_gpu.py: each is drawn from its name alone."""

import random
from dataclasses import dataclass, fields
from typing import Any

# How often each kind is drawn.
KINDS = {
    "causal": 4, "bidirectional": 4, "lion": 2, "channel": 2, "exponential": 2, "hybrid": 2, "step": 1,
    "exponential_step": 1, "convolution": 1,
}  # fmt: skip
ALIKE = 3  # cases in a row that share their kernels: to compile them is what takes time
WIDTHS = [16, 16, 32, 32, 48, 64, 64, 80, 96, 112, 128, 128, 160, 192, 224, 256, 20, 24, 40, 72, 100, 200]
# Under a normaliser row sums of these stay far from 0, of few keys too.
POSITIVE = [None, "elu", "softmax_pair", "norm_power", "unit_silu"]
WITH_TABLES = ["pair_relu", "split_power", "split_expm1", "squares", "squares_and_linear", "shifted_power"]
STEPS = ["step", "exponential_step"]
EXPONENTIAL = ["exponential", "exponential_step"]
DIVIDED = [*EXPONENTIAL, "hybrid"]  # by themselves, the others under a normaliser
TWO_PARTS = ["softmax_pair", "norm_power", "split_power", "split_expm1", "squares_and_linear"]
DECAYS: dict[str, list[str | None]] = {
    "causal": [None, "head", "token"], "lion": ["head", "token"], "channel": ["channel"],
    "step": [None, "head", "token", "channel"], "exponential": ["token"],
    "exponential_step": ["token"],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call.

    ``gate``: how slow decays are. ``weighed``: by ``log_input``; of hybrid attention the linear part has a gate, of a
    convolution an activation. ``own_norm``: features of its own for the denominator. ``mask``: where real tokens are.
    ``cuts``: offsets of packed sequences. ``projected``: tokens before heads in memory; a convolution has a residual.
    ``window``: of hybrid attention, and of a convolution.
    """

    name: str
    kind: str
    dtype: str
    K: int
    V: int
    H: int
    H_kv: int
    B: int
    T: int
    Tk: int
    map: str | None
    norm: str | None
    decay: str | None
    gate: float
    index: str
    weighed: bool
    own_norm: bool
    initial: bool
    final: bool
    mask: str | None
    cuts: tuple[int, ...] | None
    projected: bool
    layout: str | None
    window: int | None

    def __str__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        without = () if self.decay else ("gate", "index")
        said = [f"{n}={x}" for n, x in given.items() if x is not None and x is not False and n not in without]
        return " ".join([self.name, *said])

    @property
    def divided(self) -> bool:
        return self.norm is not None or self.kind in DIVIDED

    @property
    def features(self) -> int:
        return features_of(self.map, self.K)

    @property
    def flows(self) -> int:
        return 2 if self.map in ("split_power", "split_expm1") else 1

    @property
    def sequences(self) -> int:
        return self.B if self.cuts is None else len(self.cuts) - 1


def features_of(feature_map: str | None, K: int) -> int:
    return (2 if feature_map in TWO_PARTS else 1) * K + (feature_map in ("squares", "squares_and_linear"))


def name_of(kinds: list[str], seed: int, worker: int, number: int) -> str:
    chance = random.Random(f"{seed}-{worker}-{number // ALIKE}")
    kind = chance.choices(kinds, [KINDS[kind] for kind in kinds])[0]
    return f"{kind}-{seed}-{worker}-{number}"


def case_of(name: str, *, tiny: bool = False) -> Case:
    """The case of ``KIND-SEED-WORKER-NUMBER``; ``tiny``: of a size for Triton's interpreter."""
    kind, seed, worker, number = name.split("-")
    shared, own = random.Random(f"{kind}-{seed}-{worker}-{int(number) // ALIKE}"), random.Random(name)
    known = _compiled_for(kind, shared, [16, 20, 32] if tiny else WIDTHS)
    packed = shared.random() < 0.25 and kind not in STEPS
    masked = shared.random() < 0.3 and kind not in STEPS
    # Of a single key, or one that all others decay beside, the gradients under a normaliser are what rounding leaves.
    divided = known["norm"] is not None or kind in DIVIDED
    shortest = 8 if divided and not known["initial"] else 1
    longest = 40 if tiny else 1500
    T = 1 if kind in STEPS else max(shortest, own.choice([own.randint(1, longest), round(longest ** own.random())]))
    other = kind == "bidirectional" and not packed and own.random() < 0.3
    Tk = own.randint(8, longest) if other else T
    return Case(
        name, kind, **known, T=T, Tk=Tk, B=1 if packed else own.randint(1, 2 if tiny else 3),
        gate=own.choice([4.0, 2.0] if divided else [4.0, 2.0, 0.0, -4.0]),
        mask=own.choice(["holes", "left", "right"]) if masked and Tk >= 16 else None,
        cuts=(0, *sorted(own.randint(0, T) for _ in range(own.randint(0, 4))), T) if packed else None,
    )  # fmt: skip


def _compiled_for(kind: str, chance: random.Random, widths: list[int]) -> dict[str, Any]:
    linear = kind in ("causal", "bidirectional", "lion", "channel", "step")
    norm = chance.choice(["sum", "sum", None, "abs_max_one"]) if linear else None
    dtype = chance.choice(["bfloat16", "bfloat16", "float16", "float32"])
    maps = POSITIVE if norm and kind != "bidirectional" else [*POSITIVE, "relu", *WITH_TABLES]
    if dtype == "float16" and norm is None:
        maps = [None, "softmax_pair", "norm_power", "unit_silu"]  # sums of larger features overflow
    feature_map = chance.choice(maps) if linear and norm != "abs_max_one" else None
    H_kv, layout = chance.choice([1, 2]), chance.choice(["chunks", "sliding", "budget"]) if kind == "hybrid" else None
    final = kind in STEPS or (kind != "lion" and chance.random() < 0.5)
    return {
        "dtype": dtype,
        "K": chance.choice([width for width in widths if features_of(feature_map, width) <= 256]),
        "V": chance.choice(widths),
        "H": H_kv * chance.choice([1, 1, 2, 3]),
        "H_kv": H_kv,
        "map": feature_map,
        "norm": norm,
        "decay": chance.choice(DECAYS.get(kind, [None])),
        "index": chance.choice(["query", "key"]),
        "weighed": kind not in EXPONENTIAL and chance.random() < 0.25,
        "own_norm": norm == "sum" and feature_map is None and chance.random() < 0.3,
        "final": final,
        "initial": kind in STEPS or (final and kind != "hybrid" and chance.random() < 0.6),
        "projected": chance.random() < 0.5,
        "layout": layout,
        "window": _window(kind, layout, chance),
    }


def _window(kind: str, layout: str | None, chance: random.Random) -> int | None:
    if kind == "convolution":
        return chance.randint(1, 8)
    return None if layout is None else chance.choice([0, 7, 21, 64] if layout == "sliding" else [32, 64])
