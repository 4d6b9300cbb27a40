"""One model with one mechanism: how its rows are observed, checked, timed and profiled, and in which order."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from linattn.lab.bench.kernels.clock import TimeLimitError, time_limit
from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.models.cases import ModelCase
from linattn.lab.bench.models.check import ModelTruth, checked_part
from linattn.lab.bench.models.hosts import Host, create_host, draw_batch
from linattn.lab.bench.models.look import Look, look_at
from linattn.lab.bench.models.profiling import profile_step
from linattn.lab.bench.models.rows import ModelRow
from linattn.lab.bench.models.settings import ModelsConfig
from linattn.lab.bench.models.steps import (
    COMPILED,
    EAGER_GRAPH,
    REDUCED,
    Step,
    code_of,
    compile_host,
    flash_only,
    make_step,
    marked,
    run_aside,
)
from linattn.lab.bench.models.timing import time_step
from linattn.lab.bench.oracle import Verdict

FIRST_SECONDS = 240.0  # limit of a first step
OnWork = Callable[[str], None]


class Subject:
    """One model with one mechanism; its modes share the exact values and, where possible, the compiled code."""

    def __init__(self, config: ModelsConfig, case: ModelCase, mechanism: str, on_work: OnWork) -> None:
        self.config, self.case, self.mechanism, self.on_work = config, case, mechanism, on_work
        self.device = config.torch_device
        self.inputs, self.targets = draw_batch(case, self.device, config.seed)
        self.truth = ModelTruth(case, mechanism, self.inputs, self.targets, config.seed, config.autocast)
        self._look: Look | None = None
        self._doing, self._since = "", 0.0
        self._too_large = ""  # the reason, if it is
        self._steps: dict[str, tuple[Step, float]] = {}

    def measure(self, row: ModelRow) -> None:
        """Fill a row; problems are noted in it."""
        if row.mode != COMPILED and self.device.type != "cuda":
            row.status, row.reason = "absent", "CUDA graphs need a GPU"
            return
        if self._too_large:
            row.status, row.reason = "out of memory", self._too_large
            return
        self._doing = ""
        try:
            with flash_only(self.case, self.mechanism, self.device):
                self._fill(row)
                self._work(row)
        except TimeLimitError as error:
            row.status, row.reason = "left out", f"its first step was {error}"
        except torch.OutOfMemoryError as error:
            # It would be too large the next time too: unlike a failure it is not tried again.
            self._too_large = " ".join(f"{self._doing}: {error}".split())[:240]
            row.status, row.reason = "out of memory", self._too_large
            self._steps.clear()
        except Exception as error:
            # A model that is broken or does not fit must not take the others' rows with it.
            row.status, row.reason = "failed", " ".join(f"{type(error).__name__}: {error}".split())[:240]

    def check(self, row: ModelRow) -> None:
        """Fill what needs no quiet GPU in an eager step's row: which form attention takes, and if the step is right."""
        with flash_only(self.case, self.mechanism, self.device):
            self._work(row, "looking at attention")
            self._note_look(row)
            self._work(row, "checking")
            self._count(row, create_host(self.case, self.mechanism, torch.device("meta"), self.config.seed))
            if self.case.checked_depth is None:
                self._make_host(row.mode)
            self._note_verdict(row)
            self._work(row)

    def _fill(self, row: ModelRow) -> None:
        known = row.mode == EAGER_GRAPH and row.checked  # beforehand
        if not known:
            self._work(row, "looking at attention")
            self._note_look(row)
        self._work(row, "first step" if row.mode == EAGER_GRAPH else "compiling")
        step, row.first_seconds = self._step(row.mode)
        if not known:
            self._count(row, self.host)
            self._work(row, "checking")
            self._note_verdict(row)
        assert row.error is not None
        assert row.budget is not None
        self._work(row, "timing")
        row.peak_bytes = peak_bytes(run_aside(step, self.device) if row.mode == EAGER_GRAPH else step, self.device)
        timing = time_step(step, row.mode, self.device, self.config.milliseconds)
        if timing is None:
            row.status, row.reason = "absent", "the step cannot be captured as a CUDA graph"
            return
        row.median_ms, row.p20_ms, row.p80_ms = timing.median, timing.p20, timing.p80
        row.per_second = self.case.units / (timing.median / 1000)
        if row.mode == COMPILED:
            self._work(row, "profiling")
            row.profile = profile_step(step, self.device)
        judge(row, row.error <= row.budget, on_gpu=self.device.type == "cuda")

    def _note_look(self, row: ModelRow) -> None:
        look = self._looked()
        row.explain, row.beside, row.on_kernels = look.explain, look.beside, look.on_kernels
        row.explain_of = self.case.checked_part

    def _count(self, row: ModelRow, whole: Host) -> None:
        row.parameters, row.calls = sum(p.numel() for p in whole.parameters()), self._looked().calls_of(whole)

    def _note_verdict(self, row: ModelRow) -> None:
        verdict = self._verdict(row.mode)
        row.error, row.budget, row.worst_tensor = verdict.error, verdict.budget, verdict.worst
        row.checked_against = verdict.against

    def _work(self, row: ModelRow, what: str = "") -> None:
        """Begin a part of the work and record the time of the part before it; empty: all is done."""
        now = time.perf_counter()
        if self._doing:
            row.took[self._doing] = round(now - self._since, 3)
        self._doing, self._since = what, now
        if what:
            self.on_work(f"{row.case}, {row.mode}: {row.mechanism}, {what}")

    def _looked(self) -> Look:
        if self._look is None:
            host = self._created(self.case.checked_depth)
            self._look = look_at(host, self.mechanism, self.inputs, self.targets, self.config.autocast)
        return self._look

    def _step(self, mode: str) -> tuple[Step, float]:
        """The step, run once, and the seconds that took; a captured step uses the compiled one."""
        key = code_of(mode)
        if key not in self._steps:
            self._steps.clear()  # compiled code and graphs of the other mode keep memory
            if self.config.compiles:
                torch.compiler.reset()
            self._make_host(mode)
            step = self._made_step(mode, self.host, self._loss_of)
            first = run_aside(step, self.device) if key == EAGER_GRAPH else step
            begin = time.perf_counter()
            with time_limit(FIRST_SECONDS):
                first()
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
            self._steps[key] = step, time.perf_counter() - begin
        return self._steps[key]

    def _make_host(self, mode: str) -> None:
        self.host = self._created()
        self._loss_of = compile_host(self.host, mode, self.config.backend)

    def _created(self, depth: int | None = None) -> Host:
        return create_host(self.case, self.mechanism, self.device, self.config.seed, depth=depth)

    def _made_step(self, mode: str, host: Host, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
        """Make the step of the host as it is now."""
        step = make_step(host, loss_of, self.inputs, self.targets, self.config.autocast)
        return marked(step) if mode == REDUCED else step

    def _verdict(self, mode: str) -> Verdict:
        """Check the code that is timed, in the whole model or in the one that is checked in its place."""
        if self.case.checked_depth is None:
            host, loss_of = self.host, self._loss_of
        else:
            host = self._created(self.case.checked_depth)
            loss_of = compile_host(host, mode, self.config.backend)  # its blocks find their existing compiled code
        with checked_part(host, self.case):
            return self.truth.check(host, self._made_step(mode, host, loss_of)())


def judge(row: ModelRow, right: bool, on_gpu: bool) -> None:
    """Judge a row: it must be right and, on a GPU, attention must use the kernels it claims."""
    if not right:
        row.status = "WRONG"
        row.reason = f"{row.worst_tensor} is off by {row.error:.1e}, allowed {row.budget:.1e}"
    elif row.on_kernels is False and on_gpu:
        others = [text for text in row.explain if not text.startswith("triton")]
        row.status, row.reason = "not on kernels", "; ".join(others) or "no call of attention was heard"
