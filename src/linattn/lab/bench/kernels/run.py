"""The race: this library in every case, then the contenders that goals refer to, then the rest."""

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from linattn.lab.bench.children import check_alive
from linattn.lab.bench.kernels.bound import Contender
from linattn.lab.bench.kernels.cases import IN_PLACE, OURS, Case
from linattn.lab.bench.kernels.contenders import make_contenders
from linattn.lab.bench.kernels.floor import Ceilings, measure_ceilings
from linattn.lab.bench.kernels.lane import Lane, OnWork, new_row, passes_of
from linattn.lab.bench.kernels.rows import KernelRow, KernelsResult
from linattn.lab.bench.kernels.settings import KernelsConfig

OnRow = Callable[[KernelRow], None]
OnBegin = Callable[[str, str], None]
OnCeilings = Callable[[Ceilings], None]


def run_kernels(
    config: KernelsConfig,
    result: KernelsResult,
    *,
    on_row: OnRow = lambda row: None,
    on_work: OnWork = lambda what: None,
    on_begin: OnBegin = lambda case, contender: None,
    on_ceilings: OnCeilings = lambda ceilings: None,
) -> KernelsResult:
    """Fill ``result``, which has an open run; ``on_row`` is called after each row, the others announce what comes.

    Rows that ``result`` already has are not measured again, except those of ``linattn triton`` beside new ones: what is
    compared should come from one run. Ctrl-C keeps the rows that are done: ``result.interrupted`` is then True.
    """
    config.check()
    deadline = time.perf_counter() + config.seconds
    try:
        with _current(config.torch_device):
            on_work("measuring copy bandwidth and matmul rate")
            ceilings = measure_ceilings(config.torch_device, small=config.quick)
            on_ceilings(ceilings)
            note_ceilings(result, ceilings)
            run = _Run(config, result, ceilings, deadline, on_row, on_work, on_begin)
            plan = plan_of(config, result)
            for step in sorted({step for step, _, _ in plan}):
                for case in config.selected():
                    contenders = [c for s, own, c in plan if (s, own.name) == (step, case.name)]
                    if contenders:
                        run.run_case(case, contenders)
    except KeyboardInterrupt:
        result.interrupted = True
    return result


def open_run(result: KernelsResult) -> int:
    """Add an entry to ``meta``'s runs; returns its number."""
    runs = result.meta.setdefault("runs", [])
    runs.append({"date": result.meta["date"], "command": result.meta["command"]})
    return len(runs) - 1


def note_ceilings(result: KernelsResult, ceilings: Ceilings) -> None:
    """Record the ceilings of a run; those of the last run are also in ``meta`` itself."""
    found = {"copy_bytes_per_second": ceilings.bandwidth, "matmul_per_second": ceilings.matmul}
    if not result.meta.get("runs"):
        open_run(result)
    result.meta["runs"][-1] |= found
    result.meta |= found


def contenders_of(config: KernelsConfig, case: Case) -> list[Contender]:
    return [c for c in make_contenders(case, config.rivals) if config.wants(c.name)]


def plan_of(config: KernelsConfig, result: KernelsResult) -> list[tuple[int, Case, Contender]]:
    """What is to be measured: step, case, contender."""
    plan = []
    for case in config.selected():
        contenders = contenders_of(config, case)
        missing = [c for c in contenders if not finished(result, case, c)]
        again = [c for c in contenders if missing and c.name == OURS and c not in missing and stale(result, case, c)]
        plan += [(step_of(case, c), case, c) for c in contenders if c in (*again, *missing)]
    return plan


def step_of(case: Case, contender: Contender) -> int:
    if contender.name in (OURS, IN_PLACE):
        return 0
    return 1 if contender.name in {goal.against for goal in (*case.forward, *case.training)} else 2


def finished(result: KernelsResult, case: Case, contender: Contender) -> bool:
    """Whether all rows exist; those that failed or were left out are tried again in the next run."""
    now = len(result.meta.get("runs", [])) - 1
    rows = [result.find(case.name, contender.name, p) for p in passes_of(case)]
    return all(row is not None and (row.status not in ("left out", "failed") or row.run == now) for row in rows)


def stale(result: KernelsResult, case: Case, contender: Contender) -> bool:
    now = len(result.meta.get("runs", [])) - 1
    return any(row.run != now for row in result.rows if (row.case, row.contender) == (case.name, contender.name))


def number_of_kernel_rows(config: KernelsConfig, result: KernelsResult) -> int:
    return sum(len(passes_of(case)) for _, case, _ in plan_of(config, result))


class _Run:
    def __init__(
        self, config: KernelsConfig, result: KernelsResult, ceilings: Ceilings, deadline: float,
        on_row: OnRow, on_work: OnWork, on_begin: OnBegin,
    ) -> None:  # fmt: skip
        self.config, self.result, self.ceilings, self.deadline = config, result, ceilings, deadline
        self.on_row, self.on_work, self.on_begin, self.device = on_row, on_work, on_begin, config.torch_device
        self.number = len(result.meta["runs"]) - 1

    def run_case(self, case: Case, contenders: list[Contender]) -> None:
        lane: Lane | None = None
        for contender in contenders:
            if time.perf_counter() > self.deadline:
                self._leave_out(case, contender)
                continue
            self.on_begin(case.name, contender.name)
            lane = lane or Lane(self.config, case, self.ceilings, self.on_work)
            rows = lane.rows(contender)
            self._add(*rows)
            self._clean(failed=any(row.status == "failed" for row in rows))

    def _leave_out(self, case: Case, contender: Contender) -> None:
        for pass_name in passes_of(case):
            if self.result.find(case.name, contender.name, pass_name) is not None:
                continue  # an earlier run has it
            row = new_row(case, contender, pass_name)
            row.status, row.reason = "left out", f"the {self.config.seconds:g} seconds of this run did not suffice"
            self._add(row)

    def _add(self, *rows: KernelRow) -> None:
        for row in rows:
            row.run = self.number
            self.result.put(row)
            self.on_row(row)

    def _clean(self, failed: bool) -> None:
        gc.collect()
        if self.device.type == "cuda":
            if failed:
                check_alive(self.device)
            torch.cuda.empty_cache()  # so that no row meets memory fragmented by earlier ones


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make the device the current GPU, which events and memory statistics refer to."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
