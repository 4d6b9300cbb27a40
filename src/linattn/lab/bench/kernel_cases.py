"""Named cases of `linattn kernels` in order of importance, each with its shape and the goals that it should reach.

A goal is a ratio of times: that of ``linattn triton`` over the floor, over another contender in the same case, or over
itself in another case. Contenders have the names of the tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from linattn.lab.bench.benchmark import FORWARD, TRAINING
from linattn.lab.bench.problems import Family, Problem
from linattn.support.options import check_option

Row = Mapping[str, Any]

OURS, CHUNKED, EAGER, COMPILED, FLASH = "linattn triton", "linattn chunked", "eager", "torch.compile", "SDPA flash"
FLA_PLAIN, FLA_NORMALIZED = "fla chunk_linear_attn", "fla chunk_linear_attn, normalised"
FLA_TOKEN, FLA_CHANNEL, FLA_HEAD = "fla fused_chunk_simple_gla", "fla chunk_gla", "fla chunk_retention"
FLA_STEP, FLA_CONVOLUTION = "fla fused_recurrent_simple_gla", "fla causal_conv1d"
MLSTM_EXPONENTIAL, MLSTM_SIGMOID = "mlstm_kernels xl_chunk", "mlstm_kernels siging"
FLOOR, COLD = "floor", "cold start"

# Limits for every case: memory beyond inputs, outputs and gradients, as a share of q, k, v and the output.
MOST_EXTRA = {FORWARD: 0.15, TRAINING: 0.30}
# Started in a fresh process with empty caches: one op without its own feature map, and one with.
COLD_CASES = ("causal-norm-4096", "pola-196")
MOST_COLD_SECONDS = 10.0


class Goal(NamedTuple):
    """Time of ``linattn triton`` over that of ``against``, in ``case`` if given, is at most ``limit``."""

    limit: float
    against: str
    case: str = ""

    def __str__(self) -> str:
        return f"<= {self.limit:.3g}x {self.against}" + (f" in {self.case}" if self.case else "")


@dataclass(frozen=True)
class KernelCase(Problem):
    """A problem with its goals of forward, and of forward and backward."""

    forward: tuple[Goal, ...] = ()
    training: tuple[Goal, ...] = ()

    @property
    def passes(self) -> tuple[str, ...]:
        """Backward first, as its first call compiles everything; that of a decoding step is not worth timing."""
        return (FORWARD,) if self.family == "step" else (TRAINING, FORWARD)


Shape = tuple[int, int, int, int]  # B, H, T, D
Goals = Sequence[Sequence[Goal]]  # of forward and of training
WIDE, NARROW = (8, 16, 4096, 128), (32, 16, 2048, 64)
VISION = {196: (256, 6, 196, 64), 3136: (64, 2, 3136, 64), 16384: (8, 12, 16384, 64), 70000: (1, 12, 70000, 64)}
MAPS = ("pola", "nala", "mirror", "quadratic")


def _case(name: str, family: Family, shape: Shape, goals: Goals = ((), ()), **more: Any) -> KernelCase:
    B, H, T, D = shape
    sizes = {"B": B, "H": H, "T": T, "K": D, "V": D}
    return KernelCase(name, family, **sizes | {"forward": tuple(goals[0]), "training": tuple(goals[1])} | more)


def _over(floor: float, share: float, rival: str) -> tuple[list[Goal], list[Goal]]:
    return [Goal(floor, FLOOR)], [Goal(share, rival)]


def _mechanism(name: str, T: int, training: Goal, *forward: Goal) -> KernelCase:
    kind: dict[str, Any] = {"causal": False, "normalized": True, "mechanism": name}
    return _case(f"{name}-{T}", "mechanism", VISION[T], (forward, [training]), **kind)


_BOTH: tuple[tuple[str, Shape], ...] = (("4096", WIDE), ("2048", NARROW))
_FEW: tuple[tuple[str, Shape], ...] = (("32768", (2, 16, 32768, 128)), ("131072", (1, 8, 131072, 64)))
_GATED: tuple[tuple[Family, float, str], ...] = (
    ("exponential", 1.7, MLSTM_EXPONENTIAL), ("sigmoid", 1.5, MLSTM_SIGMOID)
)  # fmt: skip
_CHANNEL = [Goal(0.7, FLA_CHANNEL)]
# Cases with goals come first, so that a run that ends early has them.
CASES = (
    *(_case(f"causal-{n}", "attention", s, _over(1.25, 0.5, FLA_PLAIN)) for n, s in _BOTH),
    *(_case(f"causal-norm-{n}", "attention", s, _over(1.4, 0.35, FLA_NORMALIZED), normalized=True) for n, s in _BOTH),
    *(_case(f"causal-token-{n}", "attention", s, _over(1.4, 0.4, FLA_TOKEN), decay="token") for n, s in _BOTH),
    _case("causal-channel-4096", "attention", WIDE, (_CHANNEL, _CHANNEL), decay="channel"),
    *(_case(f"causal-{n}", "attention", s, _over(1.8, 0.5, FLA_PLAIN)) for n, s in _FEW),
    *(
        _case(f"{family}-{n}", family, WIDE, _over(limit, 0.4, rival), decay="token", V=width)
        for family, limit, rival in _GATED
        for n, width in (("4096", 128), ("wide", 256))
    ),
    *(_mechanism("relu", T, Goal(0.5, COMPILED), Goal(1.35, FLOOR)) for T in (16384, 3136, 70000)),
    # At 196 tokens models use flash softmax.
    _mechanism("relu", 196, Goal(1.0, FLASH), Goal(1.6, FLOOR), Goal(1.0, FLASH)),
    *(_mechanism(name, T, Goal(1 / 6, EAGER), Goal(2.0, OURS, f"relu-{T}")) for T in VISION for name in MAPS),
    _case("lion-16384", "attention", VISION[16384], ([Goal(2.2, FLOOR)], ()), causal=False, decay="token",
          normalized=True),
    # 70 % of the copy's bandwidth.
    _case("step-64", "step", (64, 32, 1, 128), ([Goal(1 / 0.7, FLOOR)], ()), normalized=True),
    _case("causal-head-4096", "attention", WIDE, decay="head"),
    _case("convolution-4096", "convolution", (8, 1, 4096, 2048), taps=4),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def select(names: Sequence[str]) -> list[KernelCase]:
    """The named cases in the order of the table; a name that ends in ``*`` selects all that start so; none: all."""
    found: set[str] = set()
    for name in names:
        matching = [own for own in BY_NAME if own == name or (name[-1:] == "*" and own.startswith(name[:-1]))]
        if not matching:
            check_option("only", name, BY_NAME)
        found.update(matching)
    return [case for case in CASES if not names or case.name in found]


def outcomes(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What became of the goals of all cases that have rows: ``reached`` is None for what was not measured."""
    by_key = {(row["case"], row["contender"], row["pass_name"]): row for row in rows}
    found = []

    def judge(case: str, what: str, goal: str, limit: float, value: float | None, reason: str = "") -> None:
        reached = None if value is None else value <= limit
        found.append({"case": case, "what": what, "goal": goal, "value": value, "reached": reached, "reason": reason})

    for name in dict.fromkeys(row["case"] for row in rows if row["case"] in BY_NAME):
        case = BY_NAME[name]
        for pass_name, goals in ((FORWARD, case.forward), (TRAINING, case.training)):
            own = by_key.get((name, OURS, pass_name), {"status": "not measured"})
            for goal in goals:
                other = by_key.get((goal.case or name, goal.against, pass_name), {"status": "not measured"})
                judge(name, pass_name, str(goal), goal.limit, *_ratio(own, other, goal))
        for pass_name, limit in MOST_EXTRA.items():
            own = by_key.get((name, OURS, pass_name), {})
            if own.get("status") == "ok" and own.get("extra_over_qkvo") is not None:
                judge(name, f"memory, {pass_name}", f"<= {limit:.0%} of q, k, v, o", limit, own["extra_over_qkvo"])
    for row in (row for row in rows if row["pass_name"] == COLD):
        goal_text = f"<= {MOST_COLD_SECONDS:g} s"
        judge(row["case"], COLD, goal_text, MOST_COLD_SECONDS, row.get("first_seconds"), row.get("reason", ""))
    return found


def _ratio(own: Row, other: Row, goal: Goal) -> tuple[float | None, str]:
    """The time of ``linattn triton`` over what a goal is set against, and what must be known of the comparison."""
    if own["status"] != "ok" or own.get("median_ms") is None:
        return None, f"{own['status']}: {own.get('reason', '')}"
    if goal.against == FLOOR:
        return own["median_ms"] / own["floor_ms"], ""
    remark = "" if other["status"] == "ok" else f"{goal.against}: {other['status']} {other.get('reason', '')}".strip()
    if other.get("median_ms") is None:
        return None, remark
    if own["timed_by"] == other["timed_by"] or "long calls" in (own["timed_by"], other["timed_by"]):
        return own["median_ms"] / other["median_ms"], remark
    # One of them cannot be captured: both as Python calls them.
    return own["called_ms"] / other["called_ms"], remark
