"""The race itself: case by case in order of importance, within the time it is given."""

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from linattn.bench.kernels.bound import Contender
from linattn.bench.kernels.cases import Case
from linattn.bench.kernels.contenders import make_contenders
from linattn.bench.kernels.floor import Ceilings, measure_ceilings
from linattn.bench.kernels.lane import Lane, OnWork, new_row, passes_of
from linattn.bench.kernels.rows import KernelRow, KernelsResult
from linattn.bench.kernels.settings import KernelsConfig

OnRow = Callable[[KernelRow], None]


def run_kernels(
    config: KernelsConfig,
    result: KernelsResult,
    *,
    on_row: OnRow = lambda row: None,
    on_work: OnWork = lambda what: None,
) -> KernelsResult:
    """Fill ``result``; ``on_row`` comes after each row, ``on_work`` tells what is under way.

    Cases that ``result`` has complete are not measured again; one that was cut short is, with all its contenders, so
    that what is compared comes from one run. Ctrl-C keeps the rows that are done: ``result.interrupted`` is then True.
    """
    config.check()
    begin = time.perf_counter()
    try:
        with _current(config.torch_device):
            on_work("measuring copy bandwidth and matmul rate")
            ceilings = measure_ceilings(config.torch_device, small=config.quick)
            run = _Run(config, result, ceilings, begin + config.seconds, on_row, on_work)
            for case in config.selected():
                if not complete(result, config, case):
                    result.rows = [row for row in result.rows if row.case != case.name]
                    run.run_case(case)
    except KeyboardInterrupt:
        result.interrupted = True
    return result


def contenders_of(config: KernelsConfig, case: Case) -> list[Contender]:
    return [c for c in make_contenders(case, config.rivals) if config.wants(c.name)]


def number_of_kernel_rows(config: KernelsConfig) -> int:
    return sum(len(contenders_of(config, case)) * len(passes_of(case)) for case in config.selected())


def complete(result: KernelsResult, config: KernelsConfig, case: Case) -> bool:
    """Whether every contender has its rows, and none was left out for want of time."""
    rows = [result.find(case.name, c.name, p) for c in contenders_of(config, case) for p in passes_of(case)]
    return all(row is not None and row.status != "left out" for row in rows)


class _Run:
    def __init__(
        self, config: KernelsConfig, result: KernelsResult, ceilings: Ceilings, deadline: float,
        on_row: OnRow, on_work: OnWork,
    ) -> None:  # fmt: skip
        self.config, self.result, self.ceilings, self.deadline = config, result, ceilings, deadline
        self.on_row, self.on_work, self.device = on_row, on_work, config.torch_device
        ceiling = {"copy_bytes_per_second": ceilings.bandwidth, "matmul_per_second": ceilings.matmul}
        runs = result.meta.setdefault("runs", [])
        runs.append({"date": result.meta["date"], "command": result.meta["command"], **ceiling})
        result.meta |= ceiling
        self.number = len(runs) - 1

    def run_case(self, case: Case) -> None:
        contenders = contenders_of(self.config, case)
        if self._seconds_left() <= 0:
            for contender in contenders:
                self._leave_out(case, contender)
            return
        lane = Lane(self.config, case, self.ceilings, self.on_work)
        for contender in contenders:
            if self._seconds_left() < contender.cold_seconds:
                self._leave_out(case, contender)
            else:
                self._add(*lane.rows(contender))
                self._clean()

    def _leave_out(self, case: Case, contender: Contender) -> None:
        for pass_name in passes_of(case):
            row = new_row(case, contender, pass_name)
            row.status, row.reason = "left out", f"the {self.config.seconds:g} seconds of this run would not suffice"
            self._add(row)

    def _add(self, *rows: KernelRow) -> None:
        for row in rows:
            row.run = self.number
            self.result.rows.append(row)
            self.on_row(row)

    def _seconds_left(self) -> float:
        return self.deadline - time.perf_counter()

    def _clean(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # no row finds the memory cut into pieces by those before it


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Events and memory statistics are those of the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
