"""One case of the race: each contender is called once, checked, timed and weighed, in both passes."""

from collections.abc import Callable

import torch

from linattn.lab.bench.kernels.bound import Absent, Bound, Contender, Outputs, forward_call, training_call
from linattn.lab.bench.kernels.cases import IN_PLACE, Case
from linattn.lab.bench.kernels.check import Truth, grad_for
from linattn.lab.bench.kernels.clock import TimeLimitError, extra_bytes, first_call, time_call
from linattn.lab.bench.kernels.floor import Ceilings, floor_ms, qkvo_bytes
from linattn.lab.bench.kernels.problems import draw
from linattn.lab.bench.kernels.rows import KernelRow
from linattn.lab.bench.kernels.settings import KernelsConfig
from linattn.lab.bench.oracle import Verdict
from linattn.lab.bench.passes import FORWARD, TRAINING

OnWork = Callable[[str], None]


def passes_of(case: Case) -> tuple[str, ...]:
    return (FORWARD, TRAINING) if case.backward else (FORWARD,)


def new_row(case: Case, contender: Contender, pass_name: str) -> KernelRow:
    return KernelRow(case.name, contender.name, pass_name, note=contender.note, shape=case.shape)


class Lane:
    """One case: its tensors, its floor, and its exact values."""

    def __init__(self, config: KernelsConfig, case: Case, ceilings: Ceilings, on_work: OnWork) -> None:
        self.case, self.device, self.milliseconds, self.on_work = (
            case,
            config.torch_device,
            config.milliseconds,
            on_work,
        )
        on_work(f"{case.name}: drawing tensors")
        self.tensors = draw(case, self.device, config.torch_dtype, config.seed)
        self.grad = grad_for(case, self.tensors, config.seed)
        self.truth = Truth(case, self.device, config.torch_dtype, config.seed)
        self.floor = floor_ms(case, self.tensors, ceilings)
        self.qkvo = qkvo_bytes(case, self.tensors)

    def rows(self, contender: Contender) -> list[KernelRow]:
        """Rows of a contender, backward first: its first call compiles everything, as the start of a training does."""
        found = {}
        for i, pass_name in enumerate(reversed(passes_of(self.case))):
            row = found[pass_name] = new_row(self.case, contender, pass_name)
            try:
                self._fill(row, contender, first=i == 0)
            except Absent as absent:
                row.status, row.reason = "absent", _in_one_line(str(absent))
            except TimeLimitError as error:
                row.status, row.reason = "left out", f"its first call was {error}"
            except Exception as error:
                # A contender that is broken or does not fit must not take the others' rows with it.
                row.status, row.reason = "failed", _in_one_line(f"{type(error).__name__}: {error}")
        return [found[pass_name] for pass_name in passes_of(self.case)]

    def _fill(self, row: KernelRow, contender: Contender, first: bool) -> None:
        def work(what: str) -> None:
            self.on_work(f"{self.case.name}, {row.pass_name}: {contender.name}, {what}")

        device, backward = self.device, row.pass_name == TRAINING
        work("first call")
        bound = contender.bind(self.case, self.tensors)
        call: Callable[[], Outputs] = training_call(bound, self.grad) if backward else forward_call(bound)
        seconds = first_call(call, device, contender.first_seconds)
        row.first_seconds = seconds if first else None
        work("checking")
        for verdict, at_full_size in self._verdicts(contender, bound, backward):
            self._judge(row, verdict, at_full_size)
        work("timing")
        clocked = time_call(call, device, self.milliseconds)
        timing, row.timed_by, row.called_ms = clocked.timing, clocked.by, clocked.called_ms
        row.median_ms, row.p20_ms, row.p80_ms = timing.median, timing.p20, timing.p80
        row.floor_ms = self.floor[row.pass_name]
        row.over_floor = timing.median / row.floor_ms
        work("weighing")
        row.extra_bytes = extra_bytes(call, device)
        row.extra_over_qkvo = row.extra_bytes / self.qkvo

    def _verdicts(self, contender: Contender, bound: Bound, backward: bool) -> list[tuple[Verdict, bool]]:
        found = []
        if contender.at_reduced_size:
            found.append((self.truth.check(contender, backward), False))
        if not contender.softmax:
            try:
                fresh = contender.bind(self.case, self.tensors) if contender.name == IN_PLACE else bound
                found.append((self.truth.check_full(fresh, self.tensors, self.grad, backward), True))
            except torch.OutOfMemoryError:
                if not found:
                    raise
        return found

    def _judge(self, row: KernelRow, verdict: Verdict, at_full_size: bool) -> None:
        if at_full_size:
            row.error_at_full_size = verdict.error
        if row.error is None or (not verdict.ok and row.status == "ok"):
            row.error, row.budget, row.worst_tensor = verdict.error, verdict.budget, verdict.worst
            row.checked_against = verdict.against
        if not verdict.ok:
            row.status = "WRONG"
            row.reason = row.reason or f"{verdict.worst} is off by {verdict.error:.1e}, allowed {verdict.budget:.1e}"


def _in_one_line(text: str) -> str:
    return " ".join(text.split())[:240]
