"""`linattn bench`: time and memory of linear attention beside softmax attention, by length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from linattn.lab.bench.benchmark import FORWARD, TRAINING, Benchmark, Lines, Row, Type, hold, shared
from linattn.lab.bench.memory import check_affordable, peak_bytes
from linattn.lab.bench.problems import Bind, Problem, Tensors, Truth, bind_form, bind_softmax, drawn
from linattn.lab.bench.series import clear_growth, compare_with, steady, times_by
from linattn.lab.bench.timing import Call, measure_in_turns
from linattn.lab.cases import Case, Work
from linattn.mechanisms.registry import list_mechanisms, mechanism_info
from linattn.ops.shared.call import IMPLEMENTATIONS
from linattn.support.config import option
from linattn.support.options import OptionError

SDPA, RECURRENT = "sdpa", "recurrent"
PATIENCE_WITH_SDPA = 12  # every row is compared with softmax attention, so it may take longer than others
MOST_RECORDED = 1024  # tokens: beyond, records of the allocations of a token loop would outweigh the call


@dataclass(frozen=True, kw_only=True)
class Attention(Benchmark):
    """Time and memory of linear attention beside softmax attention, each row checked against fp64.

    What is predicted to take too long is left out. Exit code: 0 all right, 1 a row was WRONG or failed, 2 a bad option,
    130 interrupted (what is done is kept).
    """

    lengths: tuple[int, ...] = option(
        (), "Sequence lengths, with commas.", least=1, affects=False, default_text="1024 to 32768 by factors of two"
    )  # fmt: skip
    impl: tuple[str, ...] = option(
        ("chunked", RECURRENT, "reference"), "Forms of linear attention, with commas.",
        choices=("auto", *IMPLEMENTATIONS),
    )  # fmt: skip
    mechanisms: tuple[str, ...] = option(
        (), "Registered mechanisms to measure too, with commas.", choices=list_mechanisms
    )  # fmt: skip
    batch: int = option(1, "Batch size.", least=1)
    heads: int = option(8, "Number of heads.", least=1)
    head_dim: int = option(64, "Width of a head.", least=1)
    causal: bool = option(True, "Whether a token sees no token that follows.")
    decay: Literal["none", "head", "token", "channel"] = option("none", "Decay of the state.")
    dtype: Type = option("float32", "Type of the inputs.")
    quick: bool = option(False, "A short run: lengths 256,512,1024, few repeats.")
    max_seconds: float = option(5.0, "Leave out what is predicted to take longer per call.", above=0)
    max_gib: float | None = option(
        None, "Leave out what is predicted to need more memory.", above=0, default_text="half of what is free"
    )  # fmt: skip

    name: ClassVar[str] = "attention"
    keys: ClassVar[tuple[str, ...]] = ("length", "pass_name", "contender")
    lines: ClassVar[Lines] = Lines("contender", "length", split=("pass_name",))
    columns: ClassVar[tuple[str, ...]] = (
        "length", "pass_name", "contender", "median_ms", "spread", "over_sdpa", "peak_MiB", "budget",
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        if not self.impl and not self.mechanisms:
            raise OptionError("impl", "name at least one form or one mechanism")
        for name in self.mechanisms:
            if not getattr(mechanism_info(name), kind := "causal" if self.causal else "bidirectional"):
                able = list_mechanisms(causal=True) if self.causal else list_mechanisms(bidirectional=True)
                raise OptionError("mechanisms", f"{name} is not {kind}; these are: {', '.join(able)}")

    def filled(self) -> Self:
        """By default on a CPU: that is what the documented table is of."""
        lengths = self.lengths or ((256, 512, 1024) if self.quick else tuple(2**n for n in range(10, 16)))
        return replace(self, device=self.device or "cpu", lengths=lengths)

    @property
    def file_name(self) -> str:
        parts = ["attention", "causal" if self.causal else "bidirectional"]
        parts += [] if self.decay == "none" else [f"{self.decay}-decay"]
        parts += [] if self.dtype == "float32" else [self.dtype]
        return "-".join([*parts, *self.mechanisms])

    def cases(self) -> list[dict[str, Any]]:
        lengths = sorted(set(self.filled().lengths))
        return [
            self.case(length=T, pass_name=p, contender=name)
            for T in lengths for name in self.contenders() for p in (FORWARD, TRAINING)
        ]  # fmt: skip

    def fill(self, case: Case, work: Work, row: Row) -> None:
        """Check a contender, time it and weigh it; forms of one mechanism at one length share tensors and truth."""
        name, length, training = case["contender"], case["length"], case["pass_name"] == TRAINING
        (mechanism, bind), device = self.contenders()[name], self.place()

        def calls_at(n: int) -> tuple[Call, Call | None]:
            timed, weighed = self.calls(bind, *self.drawn(n, mechanism)[:3], training)
            return timed, weighed if name != RECURRENT or n <= MOST_RECORDED else None

        work.tell(0.0, "predicting")
        most_seconds = self.max_seconds * (PATIENCE_WITH_SDPA if name == SDPA else 1)
        check_affordable(calls_at, length, device, most_seconds, self.max_gib)
        work.tell(0.3, "checking")
        key = self.name, length, mechanism, str(case["settings"])
        problem, tensors, grad, truth = shared(key, lambda: self.drawn(length, mechanism))
        hold(row, truth.check(bind(problem, tensors), grad if training else None, softmax=name == SDPA))
        work.tell(0.5, "timing")
        timed, weighed = calls_at(length)
        seconds, repeats = (0.05, 3) if self.quick else (0.5, 5)
        row |= measure_in_turns({"": timed}, device, min_seconds=seconds, min_repeats=repeats)[""].row()
        if weighed is not None:
            row["peak_bytes"] = peak_bytes(weighed, device)

    def contenders(self) -> dict[str, tuple[str, Bind]]:
        """The mechanism and how it is computed; softmax comes first, as all others are compared to it."""
        forms = {impl: ("", bind_form(impl)) for impl in self.impl}
        return {SDPA: ("", bind_softmax)} | forms | {name: (name, bind_form("auto")) for name in self.mechanisms}

    def drawn(self, length: int, mechanism: str) -> tuple[Problem, Tensors, Tensor, Truth]:
        """Linear attention of features ``elu + 1``, which are made beforehand; or a mechanism."""
        kind: dict[str, Any] = {"decay": self.decay, "normalized": True}
        kind = {"causal": self.causal} | ({"mechanism": mechanism} if mechanism else kind)
        family: Any = "mechanism" if mechanism else "attention"
        problem = Problem("bench", family, self.batch, self.heads, length, self.head_dim, self.head_dim, **kind)
        return problem, *drawn(problem, self.place(), getattr(torch, self.dtype), self.seed)

    @staticmethod
    def calls(bind: Bind, problem: Problem, tensors: Tensors, grad: Tensor, training: bool) -> tuple[Call, Call]:
        """The call that is timed, and the one whose memory is measured: with inputs of its own, which count too."""

        def weighed() -> object:
            own = {name: t.clone() for name, t in tensors.items()}
            return bind(problem, own).call(grad.clone() if training else None)()

        return bind(problem, tensors).call(grad if training else None), weighed

    def derived(self, rows: list[Row]) -> list[Row]:
        compare_with(rows, "contender", SDPA, "length", "pass_name", key="over_sdpa")
        return sorted(rows, key=lambda row: (row["length"], row["pass_name"]))

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        powers = [f"{g['contender']} {g['pass_name']} T^{g['exponent']:.2f}" for g in growth(rows)]
        return [f"time grows with: {', '.join(powers)}"] if powers else []


def growth(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The exponent of ``time ~ T^p`` for each contender and pass, where one can be told."""
    found = []
    for pass_name in dict.fromkeys(row["pass_name"] for row in rows):
        for contender in dict.fromkeys(row["contender"] for row in rows if "contender" in row):
            exponent = clear_growth(times_by(steady(rows), "length", contender=contender, pass_name=pass_name))
            if exponent is not None:
                found.append({"contender": contender, "pass_name": pass_name, "exponent": exponent})
    return found
