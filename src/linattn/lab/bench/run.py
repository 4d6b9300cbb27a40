"""The benchmark: lengths from short to long, passes, contenders; each row is checked, timed and weighed."""

from collections.abc import Callable, Iterator

import torch

from linattn.lab.bench.contenders import Contender, make_contenders
from linattn.lab.bench.inputs import Inputs, make_inputs
from linattn.lab.bench.limits import Cost, Limits, bytes_of_qkvo
from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.oracle import Oracle, Verdict
from linattn.lab.bench.passes import FORWARD, TRAINING, grad_like, make_call, make_fresh_call
from linattn.lab.bench.rows import Result, Row
from linattn.lab.bench.settings import BenchConfig
from linattn.lab.bench.timing import Timing, measure_in_turns

# Calls faster than this are timed in turns; in slower ones a busy moment averages out within the call.
CHEAP_SECONDS = 0.5

OnRow = Callable[[Row], None]
OnWork = Callable[[str], None]


def run_bench(
    config: BenchConfig,
    result: Result,
    *,
    on_row: OnRow = lambda row: None,
    on_work: OnWork = lambda what: None,
) -> Result:
    """Fill ``result``, row by row; ``on_row`` is called after each row, ``on_work`` with what is under way.

    Ctrl-C ends the run early and keeps the rows that are done: ``result.interrupted`` is then True.
    """
    config.check()

    def add(row: Row) -> None:
        result.add(row)
        on_row(row)

    try:
        bench = _Bench(config, add, on_work)
        for length in sorted(set(config.lengths)):
            bench.run_length(length)
    except KeyboardInterrupt:
        result.interrupted = True
    return result


def number_of_rows(config: BenchConfig) -> int:
    passes = 2 if config.backward else 1
    return len(set(config.lengths)) * passes * len(make_contenders(config))


class _Bench:
    def __init__(self, config: BenchConfig, add: OnRow, on_work: OnWork) -> None:
        self.config, self.add, self.on_work = config, add, on_work
        self.contenders = make_contenders(config)
        self.limits = Limits(config)
        self.device = config.torch_device

    def run_length(self, length: int) -> None:
        inputs = make_inputs(self.config, length)
        grad = grad_like(inputs, self.config.seed)
        oracle = Oracle(inputs, grad, self.config.causal, self.config.backward)
        for pass_name in (FORWARD, TRAINING) if self.config.backward else (FORWARD,):
            entrants = [c for c in self.contenders if self._admitted(c, inputs, pass_name)]
            for group in self._groups(entrants, length, pass_name):
                self._run_group(group, inputs, grad, oracle, pass_name)

    def _admitted(self, contender: Contender, inputs: Inputs, pass_name: str) -> bool:
        """Whether a row is measured; rows that are not are written at once, with the reason."""
        length = inputs.length
        self.on_work(f"T={length} {pass_name}: {contender.name}, predicting")
        row = Row(contender.name, length, pass_name, "left out")
        try:
            row.reason = self.limits.reason_to_leave_out(contender, self.limits.predict(contender, pass_name, length))
        except Exception as error:
            # A broken contender must not take the others' rows with it; its own row says what happened.
            row.status, row.reason = "failed", _in_one_line(error)
        if row.reason:
            self.add(row)
        return not row.reason

    def _groups(self, entrants: list[Contender], length: int, pass_name: str) -> Iterator[list[Contender]]:
        """Groups of contenders: the cheap ones together, each of the others alone."""
        seconds = {c.name: self.limits.predict(c, pass_name, length).seconds for c in entrants}
        cheap = [c for c in entrants if seconds[c.name] < CHEAP_SECONDS]
        if cheap:
            yield cheap
        yield from ([c] for c in entrants if c not in cheap)

    def _run_group(
        self, group: list[Contender], inputs: Inputs, grad: torch.Tensor, oracle: Oracle, pass_name: str
    ) -> None:
        verdicts: dict[str, Verdict] = {}
        for contender in group:
            self.on_work(f"T={inputs.length} {pass_name}: {contender.name}, checking")
            try:
                verdicts[contender.name] = oracle.check(contender, pass_name == TRAINING)
            except Exception as error:
                self.add(Row(contender.name, inputs.length, pass_name, "failed", _in_one_line(error)))
        checked = [c for c in group if c.name in verdicts]
        try:
            timings = self._time(checked, inputs, grad, pass_name)
            peaks = {c.name: self._weigh(c, inputs, pass_name) for c in checked}
        except Exception as error:
            for contender in checked:
                self.add(Row(contender.name, inputs.length, pass_name, "failed", _in_one_line(error)))
            return
        for contender in checked:
            timing, peak = timings[contender.name], peaks[contender.name]
            predicted = self.limits.predict(contender, pass_name, inputs.length)
            cost = Cost(inputs.length, timing.median, predicted.peak if peak is None else peak)
            self.limits.learn(contender, pass_name, cost)
            self.add(self._row(contender, inputs.length, pass_name, timing, verdicts[contender.name], peak))

    def _time(
        self, contenders: list[Contender], inputs: Inputs, grad: torch.Tensor, pass_name: str
    ) -> dict[str, Timing]:
        self.on_work(f"T={inputs.length} {pass_name}: {', '.join(c.name for c in contenders)}, timing")
        calls = {c.name: make_call(c, inputs, pass_name, grad) for c in contenders}
        return measure_in_turns(
            calls, self.device, min_seconds=self.config.min_seconds, min_repeats=self.config.min_repeats
        )

    def _weigh(self, contender: Contender, inputs: Inputs, pass_name: str) -> int | None:
        if not self.config.memory or inputs.length > (contender.longest_weighed or inputs.length):
            return None
        self.on_work(f"T={inputs.length} {pass_name}: {contender.name}, weighing")
        return peak_bytes(make_fresh_call(contender, inputs, pass_name), self.device)

    def _row(
        self, contender: Contender, length: int, pass_name: str, timing: Timing, verdict: Verdict, peak: int | None
    ) -> Row:
        return Row(
            contender.name,
            length,
            pass_name,
            "ok" if verdict.ok else "WRONG",
            median_ms=timing.median * 1000,
            p20_ms=timing.p20 * 1000,
            p80_ms=timing.p80 * 1000,
            repeats=timing.repeats,
            peak_bytes=peak,
            peak_over_qkvo=None if peak is None else peak / bytes_of_qkvo(self.config, length),
            error=verdict.error,
            budget=verdict.budget,
            worst_tensor=verdict.worst,
            checked_against=verdict.against,
        )


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
