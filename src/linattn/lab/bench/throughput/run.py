"""The benchmark of training throughput: mechanism by mechanism, from short to long sequences."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from linattn.lab.bench.choices import watch_choices
from linattn.lab.bench.kernels.clock import time_limit
from linattn.lab.bench.language.loop import clean, measure_rows
from linattn.lab.bench.language.model import TextModel, create_model, draw_text
from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.models.cases import SOFTMAX
from linattn.lab.bench.models.steps import COMPILED, compile_host
from linattn.lab.bench.throughput.check import check_training, loss_of
from linattn.lab.bench.throughput.rows import ThroughputResult, ThroughputRow
from linattn.lab.bench.throughput.settings import ThroughputConfig
from linattn.lab.bench.timing import Timing, seconds_of

FIRST_SECONDS = 240.0  # limit of a first step
WARM_STEPS = 2
LEARNING_RATE = 1e-5
OnRow = Callable[[ThroughputRow], None]
OnWork = Callable[[str], None]


def run_throughput(
    config: ThroughputConfig,
    result: ThroughputResult,
    *,
    on_row: OnRow = lambda row: None,
    on_work: OnWork = lambda what: None,
    on_begin: OnRow = lambda row: None,
) -> ThroughputResult:
    """Fill ``result``, which has an open run. Ctrl-C keeps the rows that are done and sets ``interrupted``."""
    config.check()
    rows = [
        ThroughputRow(mechanism, length=length, batch=config.tokens // length, run=result.run)
        for mechanism, length in plan_of(config, result)
    ]
    measure_rows(
        config, result, rows, lambda name: TrainingSubject(config, name, on_work), on_row=on_row, on_begin=on_begin
    )
    return result


def plan_of(config: ThroughputConfig, result: ThroughputResult) -> list[tuple[str, int]]:
    """The rows that are still to be measured."""
    wanted = [(mechanism, length) for mechanism in config.subjects for length in sorted(set(config.lengths))]
    return [key for key in wanted if not result.finished(key)]


class TrainingSubject:
    """The model with one mechanism; every length gets a new one, compiled for it."""

    def __init__(self, config: ThroughputConfig, mechanism: str, on_work: OnWork) -> None:
        self.config, self.mechanism, self.on_work = config, mechanism, on_work
        self.device = config.torch_device

    def fill(self, row: ThroughputRow) -> None:
        """Measure a row; problems are noted in it."""
        config = self.config
        torch.compiler.reset()
        clean(self.device)
        model = create_model(config.size, self.mechanism, self.device, config.seed)
        row.parameters = sum(p.numel() for p in model.parameters())
        inputs, targets = draw_batch(config, row.length)
        self._work(row, "looking at attention")
        with watch_choices() as choices, torch.no_grad():
            loss_of(model, inputs[:1], targets[:1], config.autocast)
        for choice in choices:
            row.explain[str(choice)] = row.explain.get(str(choice), 0) + 1
        with flash_only(config, self.mechanism):
            self._measure(row, model, inputs, targets)

    def _measure(self, row: ThroughputRow, model: TextModel, inputs: Tensor, targets: Tensor) -> None:
        compile_host(model, COMPILED, self.config.backend)
        step = training_step(model, inputs, targets, self.config.autocast)
        self._work(row, "compiling")
        begin = time.perf_counter()
        with time_limit(FIRST_SECONDS):
            step()  # from here on the optimiser's memory is allocated
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        row.first_seconds = time.perf_counter() - begin
        self._work(row, "checking")
        verdict = check_training(model, self.mechanism, inputs, targets, self.config)
        row.error, row.budget, row.worst_tensor = verdict.error, verdict.budget, verdict.worst
        row.checked_against = verdict.against
        if not verdict.ok:
            row.wrong()
            return
        self._work(row, "timing")
        losses: list[Tensor] = []
        row.peak_bytes = peak_bytes(step, self.device)
        samples = [
            seconds_of(lambda: losses.append(step()), self.device) for _ in range(WARM_STEPS + self.config.steps)
        ]
        if not torch.stack(losses).isfinite().all():
            row.status, row.reason = "WRONG", "the loss is not finite after some steps"
            return
        timing = Timing.of(samples[WARM_STEPS:])
        row.median_ms, row.p20_ms, row.p80_ms = 1000 * timing.median, 1000 * timing.p20, 1000 * timing.p80
        row.repeats, row.tokens_per_second = timing.repeats, inputs.numel() / timing.median

    def _work(self, row: ThroughputRow, what: str) -> None:
        self.on_work(f"{row.mechanism}, {row.batch} x {row.length} tokens: {what}")


def training_step(model: TextModel, inputs: Tensor, targets: Tensor, autocast: bool) -> Callable[[], Tensor]:
    """Forward, loss, backward and AdamW; returns the loss."""
    on_gpu = inputs.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=on_gpu)

    def step() -> Tensor:
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def draw_batch(config: ThroughputConfig, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and the tokens after them, ``(tokens / T, T)``; all lengths are cut from the same text."""
    text = draw_text(config.size, (config.tokens + 1,), config.torch_device, config.seed)
    return text[:-1].view(-1, length), text[1:].view(-1, length)


def flash_only(config: ThroughputConfig, mechanism: str) -> AbstractContextManager[object]:
    """Allow only PyTorch's flash kernel for softmax, so that no other kernel replaces it unnoticed."""
    if mechanism == SOFTMAX and config.torch_device.type == "cuda" and config.autocast:
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION])
    return nullcontext()
