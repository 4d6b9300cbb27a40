"""`linattn bench`: time and memory of linear attention beside softmax attention, by length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, Literal, Self

from linattn.lab.bench.benchmark import Benchmark, Type, setting
from linattn.lab.bench.charts import lines
from linattn.lab.bench.contenders import (
    FORWARD,
    SDPA,
    TRAINING,
    Contender,
    gradient_of_output,
    make_contenders,
    make_inputs,
    timed_call,
    weighed_call,
)
from linattn.lab.bench.fit import clear_growth, crossover, steady, times_by
from linattn.lab.bench.memory import Cost, free_bytes, peak_bytes, predict
from linattn.lab.bench.oracle import Oracle
from linattn.lab.bench.running import Row, one_line
from linattn.lab.bench.timing import measure_in_turns, seconds_of
from linattn.lab.cases import Case, Work
from linattn.lab.page.plots import Chart, styles
from linattn.mechanisms.registry import list_mechanisms, mechanism_info
from linattn.ops.shared.call import IMPLEMENTATIONS
from linattn.support.config import option
from linattn.support.options import OptionError

LENGTHS, QUICK_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768), (256, 512, 1024)
PROBE_REPEATS = 4  # one hiccup must not be extrapolated until the contender is left out
# Calls faster than this are timed in turns; in slower ones a busy moment averages out within the call.
CHEAP_SECONDS = 0.5
PATIENCE_WITH_SDPA = 12  # every row is compared with softmax attention, so it may take longer than others


@dataclass(frozen=True, kw_only=True)
class Attention(Benchmark):
    """Time and memory of linear attention beside softmax attention, each row checked against fp64.

    Contenders are timed in turns, so that a busy moment affects all alike. What is predicted to take too long is left
    out. Exit code: 0 all right, 1 a row was WRONG or failed, 2 a bad option, 130 interrupted (what is done is kept).
    """

    lengths: tuple[int, ...] = option(
        (), "Sequence lengths, with commas.", least=1, affects=False, default_text="1024 to 32768 by factors of two"
    )  # fmt: skip
    impl: tuple[str, ...] = option(
        ("chunked", "recurrent", "reference"), "Forms of linear attention, with commas.",
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
    backward: bool = option(True, "Measure forward with backward too.", affects=False)
    memory: bool = option(True, "Measure peak memory too.")
    quick: bool = option(False, "A short run: lengths 256,512,1024, few repeats.")
    max_seconds: float = option(5.0, "Leave out what is predicted to take longer per call.", above=0)
    max_gib: float | None = option(
        None, "Leave out what is predicted to need more memory.", above=0, default_text="half of what is free"
    )  # fmt: skip

    name: ClassVar[str] = "attention"
    keys: ClassVar[tuple[str, ...]] = ("length", "pass_name")
    columns: ClassVar[tuple[str, ...]] = (
        "length", "pass_name", "contender", "median_ms", "spread", "speedup_over_sdpa", "peak_MiB", "budget",
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
        lengths = self.lengths or (QUICK_LENGTHS if self.quick else LENGTHS)
        return replace(self, device=self.device or "cpu", lengths=lengths, dtype=self.dtype or "float32")

    @property
    def file_name(self) -> str:
        parts = ["attention", "causal" if self.causal else "bidirectional"]
        parts += [] if self.decay == "none" else [f"{self.decay}-decay"]
        parts += [] if self.dtype == "float32" else [self.dtype]
        return "-".join([*parts, *self.mechanisms])

    def cases(self) -> list[dict[str, Any]]:
        passes = (FORWARD, TRAINING) if self.backward else (FORWARD,)
        return [self.case(length=T, pass_name=p) for T in sorted(set(self.filled().lengths)) for p in passes]

    def fill(self, case: Case, work: Work, row: Row) -> None:
        """Rows of all contenders at one length in one pass."""
        row["rows"] = _Race(self, case, work).rows()

    def derived(self, rows: list[Row]) -> list[Row]:
        for row in rows:
            peers = {
                r["contender"]: r.get("median_ms")
                for r in rows
                if (r["length"], r["pass_name"]) == (row["length"], row["pass_name"]) and "contender" in r
            }
            if row.get("median_ms"):
                for other in (SDPA, "chunked"):
                    time = peers.get(other)
                    row[f"speedup_over_{other}"] = time / row["median_ms"] if time else None
        return rows

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        powers = [f"{g['contender']} {g['pass_name']} T^{g['exponent']:.2f}" for g in growth(rows)]
        left = "left out by predicted cost; --max-seconds and --max-gib move the limits"
        found = [f"time grows with: {', '.join(powers)}"] if powers else []
        return found + ([left] if any(row["status"] == "left out" for row in rows) else [])

    def charts(self, rows: Sequence[Row], meta: Mapping[str, Any]) -> list[Chart]:
        s = meta["settings"]
        kind = "causal" if s["causal"] else "bidirectional"
        shape = f"B{s['batch']} H{s['heads']} D{s['head_dim']} {s['dtype']}"
        names = list(dict.fromkeys(row["contender"] for row in rows if "contender" in row))
        looks, panels = styles(names), []
        for value, ylabel, unit in (("median_ms", "ms", 1.0), ("peak_bytes", "peak MiB", 2**20)):
            for pass_name in dict.fromkeys(row["pass_name"] for row in rows):
                own = {n: times_by(rows, "length", value, contender=n, pass_name=pass_name) for n in names}
                points = {n: {T: x / unit for T, x in found.items()} for n, found in own.items()}
                faster = crossover(points.get(SDPA, {}), points.get("chunked", {})) if value == "median_ms" else None
                if any(points.values()):
                    panels.append(lines(pass_name, ylabel, points, looks, marks=[faster] if faster else []))
        title = setting(meta, f"{kind} attention", shape, f"{meta['threads']} threads")
        reading = "One call by sequence length. Dotted: from there on the chunked form is faster than softmax."
        return [Chart("attention", title, reading, panels, looks)]


class _Race:
    """All contenders at one length in one pass: what is too costly is left out, the rest is checked and timed."""

    def __init__(self, config: Attention, case: Case, work: Work) -> None:
        self.config, self.work = config, work
        self.device, self.training = self.config.place(), case["pass_name"] == TRAINING
        self.inputs = make_inputs(self.config, case["length"])
        self.grad = gradient_of_output(self.inputs, self.config.seed) if self.training else None
        self.oracle = Oracle(self.inputs, self.grad)
        given = self.config.max_gib
        self.max_bytes = free_bytes(self.device) / 2 if given is None else given * 2**30

    def rows(self) -> list[Row]:
        found: dict[str, Row] = {}
        calls: dict[str, Contender] = {}
        cheap = set()
        contenders = make_contenders(self.config)
        for place, contender in enumerate(contenders):
            row = found[contender.name] = {"contender": contender.name}
            patience = PATIENCE_WITH_SDPA if contender.name == SDPA else 1
            try:
                self.work.tell(place / (2 * len(contenders)), f"{contender.name}, predicting and checking")
                limits = patience * self.config.max_seconds, self.max_bytes
                cost = predict(lambda n, own=contender: self._probe(own, n), self.inputs.length, *limits)  # type: ignore[misc]
                reason = cost.excess(*limits)
                if reason:
                    row |= {"status": "left out", "reason": reason}
                    continue
                row |= self.oracle.check(contender).row()
                calls[contender.name] = contender
                cheap |= {contender.name} if cost.seconds < CHEAP_SECONDS else set()
            except Exception as error:  # a broken contender must not take the others' rows with it
                row |= {"status": "failed", "reason": one_line(f"{type(error).__name__}: {error}")}
        together = [name for name in calls if name in cheap]
        for group in [together, *([name] for name in calls if name not in cheap)]:
            self._time({name: calls[name] for name in group}, found)
        return list(found.values())

    def _time(self, contenders: dict[str, Contender], rows: dict[str, Row]) -> None:
        self.work.tell(0.5, f"{', '.join(contenders)}, timing")
        calls = {name: timed_call(own, self.inputs, self.grad) for name, own in contenders.items()}
        seconds, repeats = (0.05, 3) if self.config.quick else (0.5, 5)
        try:
            timings = measure_in_turns(calls, self.device, min_seconds=seconds, min_repeats=repeats)
            for name, contender in contenders.items():
                rows[name] |= timings[name].row()
                if self.config.memory and self.inputs.length <= (contender.longest_weighed or inf):
                    peak = peak_bytes(weighed_call(contender, self.inputs, self.training), self.device)
                    least = 4 * self.inputs.q.nbytes
                    rows[name] |= {"peak_bytes": peak, "peak_over_qkvo": peak / least}
        except Exception as error:
            for name in contenders:
                rows[name] |= {"status": "failed", "reason": one_line(f"{type(error).__name__}: {error}")}

    def _probe(self, contender: Contender, length: int) -> Cost:
        inputs = self.inputs.first(length)
        grad = None if self.grad is None else self.grad[:, :, :length]
        call = timed_call(contender, inputs, grad)
        seconds = min(seconds_of(call, self.device) for _ in range(PROBE_REPEATS))
        weighed = min(length, contender.longest_weighed or length)
        peak = peak_bytes(weighed_call(contender, inputs.first(weighed), self.training), self.device)
        return Cost(length, seconds, Cost(weighed, 0, peak, contender.powers).at(length).peak, contender.powers)


def growth(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The exponent of ``time ~ T^p`` for each contender and pass, where one can be told."""
    found = []
    for pass_name in dict.fromkeys(row["pass_name"] for row in rows):
        for contender in dict.fromkeys(row["contender"] for row in rows if "contender" in row):
            exponent = clear_growth(times_by(steady(rows), "length", contender=contender, pass_name=pass_name))
            if exponent is not None:
                found.append({"contender": contender, "pass_name": pass_name, "exponent": exponent})
    return found
