"""Named cases in order of importance, each with its shape and the goals that it should reach.

A goal is a ratio of times: that of ``linattn triton`` over the floor, over another contender in the same case, or over
itself in another case. Contenders have the names of the tables.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from linattn.support.options import check_option

Family = Literal["attention", "mechanism", "exponential", "sigmoid", "step", "convolution"]
Decay = Literal["none", "head", "token", "channel"]

OURS, CHUNKED, EAGER, COMPILED = "linattn triton", "linattn chunked", "eager", "torch.compile"
IN_PLACE = f"{OURS}, in place"
FLASH, CUDNN = "SDPA flash", "SDPA cuDNN"
FLA_PLAIN, FLA_NORMALIZED = "fla chunk_linear_attn", "fla chunk_linear_attn, normalised"
FLA_TOKEN, FLA_CHANNEL, FLA_HEAD = "fla fused_chunk_simple_gla", "fla chunk_gla", "fla chunk_retention"
FLA_STEP, FLA_CONVOLUTION = "fla fused_recurrent_simple_gla", "fla causal_conv1d"
MLSTM_EXPONENTIAL, MLSTM_SIGMOID = "mlstm_kernels xl_chunk", "mlstm_kernels siging"
FLOOR = "floor"

# Limits for every case: memory beyond inputs, outputs and gradients, as a share of q, k, v and the output.
MOST_EXTRA = {"forward": 0.15, "forward+backward": 0.30}
# Started in a fresh process with empty caches: one op without its own feature map, and one with.
COLD_CASES = ("causal-norm-4096", "pola-196")
MOST_COLD_SECONDS = 10.0


@dataclass(frozen=True)
class Goal:
    """Time of ``linattn triton`` over that of ``against``, in ``case`` if given, is at most ``limit``."""

    limit: float
    against: str
    case: str = ""

    def __str__(self) -> str:
        where = f" in {self.case}" if self.case else ""
        return f"<= {self.limit:.3g}x {self.against}{where}"


@dataclass(frozen=True)
class Case:
    """``q (B, H, T, K)``, ``v (B, H, T, V)``; a convolution has ``x (B, T, K)`` and W taps, a step has no T."""

    name: str
    family: Family
    B: int
    H: int
    T: int
    K: int
    V: int
    causal: bool = True
    decay: Decay = "none"
    normalized: bool = False
    mechanism: str = ""
    taps: int = 0
    forward: tuple[Goal, ...] = ()
    training: tuple[Goal, ...] = ()
    backward: bool = True  # False for a decoding step, whose backward is not worth timing

    @property
    def shape(self) -> str:
        if self.family == "convolution":
            return f"B{self.B} T{self.T} C{self.K} W{self.taps}"
        width = f"D{self.K}" if self.K == self.V else f"K{self.K} V{self.V}"
        length = "" if self.family == "step" else f"T{self.T} "
        return f"B{self.B} H{self.H} {length}{width}"

    def resized(self, B: int, H: int, T: int, width: int | None = None, *, tag: str) -> "Case":
        """The same case with no size larger than these, and without goals, which are for the full size."""
        B, H, T = min(self.B, B), min(self.H, H), min(self.T, T)
        K, V = (self.K, self.V) if width is None else (min(self.K, width), min(self.V, width))
        return replace(self, name=f"{self.name} {tag}", B=B, H=H, T=T, K=K, V=V, forward=(), training=())

    def reduced(self) -> "Case":
        """Small enough for the matrix of all pairs in fp64, with a length that chunks of 128 divide.

        With per-channel decays each channel has a matrix.
        """
        length = 256 if self.decay == "channel" else 1024
        return self.resized(2, 4 if self.mechanism else 2, length, tag="reduced")

    def quick(self) -> "Case":
        return replace(self.resized(1, 2, 64, 16, tag="quick"), name=self.name)


def _attention(name: str, shape: tuple[int, int, int, int], forward: float, training: Goal, **options: Any) -> Case:
    B, H, T, D = shape
    goals: dict[str, Any] = {"forward": (Goal(forward, FLOOR),), "training": (training,)}
    return Case(name, "attention", B, H, T, D, D, **goals, **options)


WIDE, NARROW = (8, 16, 4096, 128), (32, 16, 2048, 64)
VISION = {196: (256, 6, 196, 64), 3136: (64, 2, 3136, 64), 16384: (8, 12, 16384, 64), 70000: (1, 12, 70000, 64)}
MAPS = ("pola", "nala", "mirror", "quadratic")


def _causal() -> list[Case]:
    both = (("4096", WIDE), ("2048", NARROW))
    cases = [_attention(f"causal-{n}", s, 1.25, Goal(0.5, FLA_PLAIN)) for n, s in both]
    cases += [
        _attention(f"causal-norm-{n}", s, 1.4, Goal(0.35, FLA_NORMALIZED), normalized=True) for n, s in both
    ]  # fmt: skip
    cases += [
        _attention(f"causal-token-{n}", s, 1.4, Goal(0.4, FLA_TOKEN), decay="token") for n, s in both
    ]  # fmt: skip
    B, H, T, D = WIDE
    cases.append(Case("causal-channel-4096", "attention", B, H, T, D, D, decay="channel",
                      forward=(Goal(0.7, FLA_CHANNEL),), training=(Goal(0.7, FLA_CHANNEL),)))  # fmt: skip
    few = (("32768", (2, 16, 32768, 128)), ("131072", (1, 8, 131072, 64)))
    return cases + [_attention(f"causal-{n}", s, 1.8, Goal(0.5, FLA_PLAIN)) for n, s in few]


def _gated() -> list[Case]:
    B, H, T, D = WIDE
    cases = []
    for family, limit, rival in (("exponential", 1.7, MLSTM_EXPONENTIAL), ("sigmoid", 1.5, MLSTM_SIGMOID)):
        for width in (D, 2 * D):
            goals: dict[str, Any] = {"forward": (Goal(limit, FLOOR),), "training": (Goal(0.4, rival),)}
            name = f"{family}-{T}" if width == D else f"{family}-wide"
            cases.append(Case(name, family, B, H, T, D, width, decay="token", **goals))  # type: ignore[arg-type]
    return cases


def _mechanism(name: str, T: int, training: Goal, *forward: Goal) -> Case:
    B, H, _, D = VISION[T]
    goals: dict[str, Any] = {"forward": forward, "training": (training,)}
    return Case(f"{name}-{T}", "mechanism", B, H, T, D, D, False, normalized=True, mechanism=name, **goals)


def _relu() -> list[Case]:
    long = [_mechanism("relu", T, Goal(0.5, COMPILED), Goal(1.35, FLOOR)) for T in (16384, 3136, 70000)]
    # At 196 tokens models use flash softmax.
    return [*long, _mechanism("relu", 196, Goal(1.0, FLASH), Goal(1.6, FLOOR), Goal(1.0, FLASH))]


def _maps() -> list[Case]:
    return [
        _mechanism(name, T, Goal(1 / 6, EAGER), Goal(2.0, OURS, f"relu-{T}")) for T in VISION for name in MAPS
    ]  # fmt: skip


def _others() -> list[Case]:
    B, H, T, D = WIDE
    # 70 % of the copy's bandwidth.
    step = Case(
        "step-64", "step", 64, 32, 1, 128, 128, normalized=True, forward=(Goal(1 / 0.7, FLOOR),), backward=False
    )
    lion = Case("lion-16384", "attention", *VISION[16384], VISION[16384][3], False, "token", normalized=True,
                forward=(Goal(2.2, FLOOR),))  # fmt: skip
    head = Case("causal-head-4096", "attention", B, H, T, D, D, decay="head")
    convolution = Case("convolution-4096", "convolution", 8, 1, 4096, 2048, 2048, taps=4)
    return [lion, step, head, convolution]


# Cases with goals come first, so that a run that ends early has them.
CASES = (*_causal(), *_gated(), *_relu(), *_maps(), *_others())


def select(names: tuple[str, ...]) -> list[Case]:
    """The named cases in the order of the table; a name that ends in ``*`` selects all that start so; none: all."""
    found: set[str] = set()
    for name in names:
        matching = [c.name for c in CASES if c.name == name or (name[-1:] == "*" and c.name.startswith(name[:-1]))]
        if not matching:
            check_option("cases", name, [c.name for c in CASES])
        found.update(matching)
    return [case for case in CASES if not names or case.name in found]
