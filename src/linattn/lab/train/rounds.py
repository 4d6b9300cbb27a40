"""Training runs on images and on text, which consist of rounds of steps: the loop, its state, and what it saves."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from json import dumps
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from linattn.lab.train.accelerator import create_optimizer, matrix_products
from linattn.lab.train.captured_step import CapturedStep, State, tell
from linattn.support.checkpoint import RunFolder
from linattn.support.compiling import compile_blocks
from linattn.support.files import write_atomically
from linattn.support.schedule import SCHEDULES, Schedule
from linattn.support.seeds import seed_step

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

OnStep = Callable[[int, int, float, float], None]
Record = TypeVar("Record", bound=Any)

# Reading the loss waits for the device; ten times a second is enough for a display and costs hardly anything.
SECONDS_BETWEEN_READINGS = 0.1
# Processes must agree on the step of a checkpoint; to ask the others at every step would cost too much.
STEPS_BETWEEN_VOTES = 50


class DivergedError(RuntimeError):
    """The loss is not finite; the message says where."""


class Reading(NamedTuple):
    """Means over images or tokens; accuracy in percent."""

    loss: float
    accuracy: float


def read(sums: Tensor, accelerator: "Accelerator | None" = None) -> Reading:
    """Wait for the device and read summed losses, hits and their number ``(3,)``.

    With an accelerator: over all processes, which must all call this.
    """
    loss, hits, number = (sums if accelerator is None else accelerator.gather(sums[None]).sum(0)).tolist()
    return Reading(loss / number, 100 * hits / number)


def graphs_wanted(config: Any, accelerator: "Accelerator") -> bool:
    """Whether to record the steps of a run; if not for a reason that the config does not show, warn with the reason."""
    if config.graphs is False or accelerator.device.type != "cuda":
        return False
    if accelerator.num_processes > 1:
        tell(f"{accelerator.num_processes} processes exchange gradients within a step")
    elif getattr(config, "accumulation", 1) > 1:
        tell(f"a step is computed in {config.accumulation} parts")
    else:
        return True
    return False


class Plan(NamedTuple):
    """Steps of a round, and of the whole run; steps in which the learning rate rises, and how it falls then."""

    round_steps: int
    total: int
    warmup: int
    schedule: Schedule = "cosine"


class Rounds(ABC, Generic[Record]):
    """The state of a run: weights, optimiser, and progress, which is ``epoch`` whole rounds and ``step`` steps.

    A round on images is an epoch; a round on text is the steps from one evaluation to the next. ``record`` is the
    dataclass of an evaluation.
    """

    named = "epoch {}, step {}"
    """How a place is told."""

    def __init__(
        self, model: nn.Module, config: Any, accelerator: "Accelerator", plan: Plan, record: type[Record]
    ) -> None:
        self.model, self.config, self.accelerator, self.plan, self.record = model, config, accelerator, plan, record
        self.epoch, self.step, self.seconds = 0, 0, 0.0
        self.records: list[Record] = []
        self.averages: list[Tensor] = []
        """Averages of weights that a step changes."""
        device = accelerator.device
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        """Of this round: loss, hits, and number of images or tokens, kept on the device: only ``read`` waits for it."""
        model.to(device)
        if config.compile:
            compile_blocks(model)
        recorded = graphs_wanted(config, accelerator)
        self.optimizer: Any
        optimizer = create_optimizer(model, config, capturable=recorded)
        self.network, self.optimizer = accelerator.prepare(model, optimizer)
        self.captured: CapturedStep | None = None
        self._rate: Tensor | None = None
        if recorded:
            # In the type that the fused kernels of the device expect.
            dtype = torch.float32 if device.type == "cuda" else torch.float64
            self._rate = torch.zeros((), device=device, dtype=dtype)
            self.captured = CapturedStep(self.update, self.changed, config.precision, device)

    @abstractmethod
    def batches_from_here(self) -> Generator[Any, None, None]:
        """All remaining batches of the run; a generator."""

    @abstractmethod
    def place(self, step: int) -> tuple[int, int]:
        """The numbers of epoch and step by which a step of this round is seeded and named."""

    @abstractmethod
    def backward(self, *inputs: Any) -> Tensor:
        """Forward and backward pass; summed loss, hits and their number ``(3,)`` fp64, on the device."""

    @abstractmethod
    def evaluate(self, reading: Reading, lr: float) -> Record:
        """Evaluate on test data; return the record of this round, with ``reading`` from training."""

    @abstractmethod
    def result(self) -> Any:
        """The result of the whole run, a dataclass."""

    @property
    def done(self) -> int:
        """Number of steps before this round."""
        return self.epoch * self.plan.round_steps

    @property
    def steps(self) -> int:
        """Number of steps in this round."""
        return min(self.plan.round_steps, self.plan.total - self.done)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step of this round."""
        _, total, warmup, schedule = self.plan
        return SCHEDULES[schedule](self.done + step, total, warmup, self.config.lr, self.config.min_lr)

    def take(self, batch: Any) -> None:
        """Call :meth:`update` with a batch, or replay that."""
        (self.captured or self.update)(*batch)

    def update(self, *inputs: Any) -> None:
        """The part of a step on the device, and nothing else, as a CUDA graph may replace it."""
        sums = self.backward(*inputs)
        if self.config.clip_norm is not None:
            self.accelerator.clip_grad_norm_(self.network.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sums += sums

    def changed(self) -> State:
        """All tensors that a step changes, by kind; not copies."""
        found: dict[str, list[Tensor]] = {
            "weights": [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            "buffers": list(self.model.buffers()),
            "averages": self.averages,
            "sums": [self.sums],
        }
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                for name, value in self.optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        found.setdefault(f"moments, {name}", []).append(value)
        return found

    def train_step(self, batches: Iterator[Any]) -> None:
        """Update the weights once. Augmentation and dropout depend only on the number of the step."""
        seed_step(self.config.seed, *self.place(self.step), self.accelerator.process_index)
        batch, rate = next(batches), self.learning_rate(self.step)
        if self._rate is not None:
            self._rate.fill_(rate)
        for group in self.optimizer.param_groups:  # those of a checkpoint have their own copies
            group["capturable"] = self._rate is not None
            group["lr"] = rate if self._rate is None else self._rate
        self.take(batch)
        self.step += 1

    def train_round(self, batches: Iterator[Any], on_step: OnStep | None, save: Callable[[], None]) -> Record:
        """Train the rest of the round, then evaluate; ``save`` is called when a checkpoint is due in between."""
        steps = self.steps
        self.network.train()
        started = last_reading = last_checkpoint = perf_counter()
        while self.step < steps:
            self.train_step(batches)
            now = perf_counter()
            if now - last_reading >= SECONDS_BETWEEN_READINGS:
                self._report(read(self.sums), on_step)
                last_reading = perf_counter()
            if self.step < steps and self._agree(now - last_checkpoint >= self.config.checkpoint_seconds):
                self.check_finite(read(self.sums).loss)
                self.seconds += perf_counter() - started
                save()
                started = last_checkpoint = perf_counter()
        reading = read(self.sums, self.accelerator)
        self.seconds += perf_counter() - started
        self._report(reading, on_step)
        self.records.append(self.evaluate(reading, self.learning_rate(steps - 1)))
        self.epoch, self.step, self.seconds = self.epoch + 1, 0, 0.0
        self.sums.zero_()  # in place, as CUDA graphs add to this tensor
        return self.records[-1]

    def check_finite(self, loss: float, what: str = "training loss") -> None:
        """Raise a :class:`DivergedError` if a loss that was read after the last step is not finite."""
        if not isfinite(loss):
            where, rate = self.named.format(*self.place(self.step - 1)), self.learning_rate(self.step - 1)
            raise DivergedError(
                f"the {what} is not finite: {where}, learning rate {rate:g}. A lower lr, a longer warm-up or a smaller "
                "clip_norm helps; checkpoint and log end before this"
            )

    def finish(self) -> None:
        """Put the weights that are evaluated into the model, and set ``eval`` mode."""
        self.model.eval()

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on; all processes must call this, as each has sums of its own share."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "records": [asdict(record) for record in self.records],
            "sums": self.accelerator.gather(self.sums[None]),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "averages": self.averages,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.step, self.seconds = state["epoch"], state["step"], state["seconds"]
        self.records = [self.record(**record) for record in state["records"]]
        self.sums.copy_(state["sums"][self.accelerator.process_index])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for average, value in zip(self.averages, state["averages"], strict=True):
            average.copy_(value)

    def close(self) -> None:
        """Turn the model back into a plain module: mixed precision has replaced its forward."""
        if self.captured is not None:
            self.captured.forget()
        if vars(self.model).pop("_original_forward", None) is not None:
            del self.model.forward

    def _report(self, reading: Reading, on_step: OnStep | None) -> None:
        self.check_finite(reading.loss)
        if on_step is not None:
            on_step(self.epoch, self.step, reading.loss, reading.accuracy)

    def _agree(self, due: bool) -> bool:
        """Whether a checkpoint is due in any process; all processes get the same answer."""
        if self.accelerator.num_processes == 1:
            return due
        if self.step % STEPS_BETWEEN_VOTES:
            return False
        votes = self.accelerator.gather(torch.tensor([due], device=self.accelerator.device))
        return bool(votes.any())


def complete(
    run: Rounds[Record],
    files: RunFolder,
    fingerprint: dict[str, Any],
    *,
    on_step: OnStep | None,
    on_record: Callable[[Record], None] | None,
) -> Any:
    """Train all remaining rounds of ``run``, save and return its result; each round writes a checkpoint and the log."""
    main = run.accelerator.is_main_process

    def save() -> None:
        state = run.state_dict()
        if main:
            files.save_checkpoint({"fingerprint": fingerprint, **state})

    try:
        checkpoint = files.load_checkpoint(fingerprint)
        if main:
            files.remove_halves()
        if checkpoint is not None:
            run.load_state_dict(checkpoint)
            if main:
                write_log(files.log, run.records)  # the log may have a round that the checkpoint does not
        # One iterator for all rounds, so that batches made ahead are not lost at an evaluation; threads end with it.
        with matrix_products(run.config.precision), closing(run.batches_from_here()) as batches:
            while run.done < run.plan.total:
                record = run.train_round(batches, on_step if main else None, save)
                save()
                if main:
                    write_log(files.log, run.records)
                    if on_record is not None:
                        on_record(record)
            run.finish()
            result = run.result()
        if main:
            files.save_result(run.model, asdict(result), fingerprint)
        run.accelerator.wait_for_everyone()
    finally:
        run.close()
    return result


def write_log(path: Path, records: Sequence[Any]) -> None:
    """Rewrite the whole log. An appended one could end in half a line, or have an epoch that is then trained again."""
    text = "".join(dumps(asdict(record), allow_nan=False) + "\n" for record in records)
    write_atomically(path, lambda temporary: temporary.write_text(text))
