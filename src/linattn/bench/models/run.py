"""The race of models: case by case, softmax first, each mechanism in every mode."""

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from linattn.bench.children import check_alive
from linattn.bench.kernels.clock import TimeLimitError, by_events, by_replays, capture, time_limit
from linattn.bench.memory import peak_bytes
from linattn.bench.models.cases import SOFTMAX, ModelCase, softmax_model
from linattn.bench.models.check import ModelTruth, checked_part
from linattn.bench.models.hosts import Host, create_host, draw_batch
from linattn.bench.models.look import Look, look_at
from linattn.bench.models.profiling import profile_step
from linattn.bench.models.rows import ModelRow, ModelsResult
from linattn.bench.models.settings import ModelsConfig
from linattn.bench.models.steps import (
    COMPILED,
    EAGER_GRAPH,
    GRAPH,
    REDUCED,
    Step,
    code_of,
    compile_host,
    flash_only,
    make_step,
    run_aside,
    side_stream,
)
from linattn.bench.oracle import Verdict
from linattn.bench.timing import Timing, measure_in_turns

FIRST_SECONDS = 240.0  # what a first step may take
Key = tuple[str, str, str]  # case, mechanism, mode
OnRow = Callable[[ModelRow], None]
OnWork = Callable[[str], None]
OnBegin = Callable[[str, str, str], None]


def run_models(
    config: ModelsConfig,
    result: ModelsResult,
    *,
    checked: Mapping[Key, ModelRow] | None = None,
    on_row: OnRow = lambda row: None,
    on_work: OnWork = lambda what: None,
    on_begin: OnBegin = lambda case, mechanism, mode: None,
) -> ModelsResult:
    """Fill ``result``, which has an open run. Ctrl-C keeps the rows that are done: ``interrupted`` is then True.

    ``checked``: rows that :meth:`Subject.check` has filled beforehand; others are checked here.
    """
    config.check()
    deadline = time.perf_counter() + config.seconds
    device = config.torch_device
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            planned: dict[tuple[ModelCase, str], list[str]] = {}
            for case, mechanism, mode in plan_of(config, result):
                planned.setdefault((case, mechanism), []).append(mode)
            for (case, mechanism), modes in planned.items():
                subject: Subject | None = None
                for mode in modes:
                    row = new_row(case, mechanism, mode, result.run)
                    twin = same_model(result, row)
                    if twin is not None:
                        row = replace(twin, case=case.name, shape=case.shape, same_as=twin.case, profile=None)
                    elif time.perf_counter() > deadline:
                        row.status, row.reason = "left out", f"the {config.seconds:g} seconds did not suffice"
                    else:
                        on_begin(*row.key)
                        row = (checked or {}).get(row.key, row)
                        subject = subject or Subject(config, case, mechanism, on_work)
                        subject.measure(row)
                    result.put(row)
                    on_row(row)
                    if row.status == "failed" and device.type == "cuda":
                        check_alive(device)
                subject = None
                clean(config)
    except KeyboardInterrupt:
        result.interrupted = True
    return result


def plan_of(config: ModelsConfig, result: ModelsResult) -> list[tuple[ModelCase, str, str]]:
    """What is to be measured; rows that failed or were left out get another chance in the next run."""
    wanted = [
        (case, mechanism, mode)
        for case in config.selected() for mechanism in config.mechanisms_of(case) for mode in config.modes
    ]  # fmt: skip
    return [(case, *rest) for case, *rest in wanted if not finished(result, case.name, *rest)]  # type: ignore[misc]


def finished(result: ModelsResult, case: str, mechanism: str, mode: str) -> bool:
    row = result.find(case, mechanism, mode)
    return row is not None and (row.status not in ("left out", "failed") or row.run == result.run)


def new_row(case: ModelCase, mechanism: str, mode: str, run: int) -> ModelRow:
    return ModelRow(case.name, mechanism, mode, shape=case.shape, unit=case.unit, run=run)


def same_model(result: ModelsResult, row: ModelRow) -> ModelRow | None:
    """The row of another case whose model on softmax is this one too, and which needs no second chance."""
    if row.mechanism != SOFTMAX:
        return None
    model = softmax_model(row.case)
    for other in result.rows:
        measured = not other.same_as and other.status not in ("left out", "failed")
        if measured and other.case != row.case and other.key[1:] == row.key[1:] and softmax_model(other.case) == model:
            return other
    return None


class Subject:
    """One model with one mechanism; its modes share the truth, and where they can the compiled code."""

    def __init__(self, config: ModelsConfig, case: ModelCase, mechanism: str, on_work: OnWork) -> None:
        self.config, self.case, self.mechanism, self.on_work = config, case, mechanism, on_work
        self.device = config.torch_device
        self.inputs, self.targets = draw_batch(case, self.device, config.seed)
        self.truth = ModelTruth(case, mechanism, self.inputs, self.targets, config.seed, config.autocast)
        self._look: Look | None = None
        self._doing, self._since = "", 0.0
        self._too_large = ""  # why
        self._steps: dict[str, tuple[Step, float]] = {}

    def measure(self, row: ModelRow) -> None:
        """Fill the row; what is wrong with it is said in it."""
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
            # It would be so the next time too: unlike a failure it is not tried again.
            self._too_large = " ".join(f"{self._doing}: {error}".split())[:240]
            row.status, row.reason = "out of memory", self._too_large
            self._steps.clear()
        except Exception as error:
            # One that is broken or does not fit must not take the others' rows with it.
            row.status, row.reason = "failed", " ".join(f"{type(error).__name__}: {error}".split())[:240]

    def check(self, row: ModelRow) -> None:
        """Fill what of the row of an eager step needs no quiet GPU: what attention takes, and whether it is right."""
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
        timing = self._timing(step, row.mode)
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
        """Begin with that, and write down what the part before it took; nothing: all is done."""
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
        """The step, run once, and the seconds that took: a captured one is the compiled one."""
        key = code_of(mode)
        if key not in self._steps:
            self._steps.clear()  # the other way's compiled code and graphs keep memory
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
        """Of the host as it is now."""
        step = make_step(host, loss_of, self.inputs, self.targets, self.config.autocast)
        return _marked(step) if mode == REDUCED else step

    def _verdict(self, mode: str) -> Verdict:
        """Of the code that is timed, in all of the model or in the one that is checked in its place."""
        if self.case.checked_depth is None:
            host, loss_of = self.host, self._loss_of
        else:
            host = self._created(self.case.checked_depth)
            loss_of = compile_host(host, mode, self.config.backend)  # its blocks find the compiled code that is there
        with checked_part(host, self.case):
            return self.truth.check(host, self._made_step(mode, host, loss_of)())

    def _timing(self, step: Step, mode: str) -> Timing | None:
        if self.device.type != "cuda":
            timing = measure_in_turns({"": step}, self.device, min_seconds=0, min_repeats=3)[""]
            return Timing(1000 * timing.median, 1000 * timing.p20, 1000 * timing.p80, timing.repeats)
        if mode == EAGER_GRAPH:  # it has run twice on that stream
            replay = capture(step, 0, side_stream(self.device))
            return None if replay is None else by_replays(replay, self.config.milliseconds)
        call = capture(step) if mode == GRAPH else step
        return None if call is None else by_events(call, self.config.milliseconds)


def judge(row: ModelRow, right: bool, on_gpu: bool) -> None:
    """A row is well if it is right and, on a GPU, attention is what it claims to be."""
    if not right:
        row.status = "WRONG"
        row.reason = f"{row.worst_tensor} is off by {row.error:.1e}, allowed {row.budget:.1e}"
    elif row.on_kernels is False and on_gpu:
        others = [text for text in row.explain if not text.startswith("triton")]
        row.status, row.reason = "not on kernels", "; ".join(others) or "no call of attention was heard"


def _marked(step: Step) -> Step:
    """PyTorch's own graphs must know where a step begins: what the last one returned may be overwritten."""

    def marked() -> tuple[torch.Tensor | None, ...]:
        torch.compiler.cudagraph_mark_step_begin()
        return step()

    return marked


def clean(config: ModelsConfig) -> None:
    if config.compiles:  # else there is nothing to forget, and to load what would do it takes seconds
        torch.compiler.reset()
    gc.collect()
    if config.torch_device.type == "cuda":
        torch.cuda.empty_cache()
