"""The base class of training runs on images and on text, which consist of rounds of steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from json import dumps
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from linattn.lab.train.accelerator import matrix_products
from linattn.lab.train.captured_step import CapturedStep, graphs_wanted
from linattn.lab.train.meter import Meter, Reading
from linattn.lab.train.optimizer import bind_rate, create_optimizer, create_rate
from linattn.lab.train.step_check import training_state
from linattn.support.checkpoint import RunFolder
from linattn.support.compiling import compile_blocks
from linattn.support.files import write_atomically

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

OnStep = Callable[[int, int, float, float], None]
Record = TypeVar("Record", bound=Any)

# Reading the loss waits for the device; ten times a second is enough for a display and costs hardly anything.
SECONDS_BETWEEN_READINGS = 0.1
# Processes must agree on the step of a checkpoint; to ask the others at every step would cost too much.
STEPS_BETWEEN_VOTES = 50


class DivergedError(RuntimeError):
    """The loss is not finite."""

    def __init__(self, epoch: int, step: int, lr: float, what: str = "training loss") -> None:
        super().__init__(
            f"the {what} is not finite: epoch {epoch}, step {step}, learning rate {lr:g}. "
            "A lower lr, more warmup_epochs or a smaller clip_norm helps; checkpoint and log end before this epoch"
        )
        self.epoch, self.step, self.lr = epoch, step, lr


class Rounds(ABC, Generic[Record]):
    """The state of a run: weights, optimiser, and progress, which is ``epoch`` whole rounds and ``step`` steps.

    A round on images is an epoch; a round on text is the steps from one evaluation to the next.
    """

    def __init__(self, model: nn.Module, config: Any, accelerator: "Accelerator") -> None:
        self.model, self.accelerator = model, accelerator
        self._settings = config
        self.epoch, self.step, self.seconds = 0, 0, 0.0
        self.epochs: list[Record] = []
        self.meter = Meter(accelerator.device)
        model.to(accelerator.device)
        if config.compile:
            compile_blocks(model)
        # Mixed precision replaces the instance's forward; `close` restores it.
        self._own_forward = vars(model).get("forward")
        self.optimizer: Any
        recorded = graphs_wanted(config, accelerator)
        optimizer = create_optimizer(model, config, capturable=recorded)
        self.network, self.optimizer = accelerator.prepare(model, optimizer)
        self._rate = create_rate(accelerator.device) if recorded else None
        bind_rate(self.optimizer.param_groups, self._rate)
        self.captured = (
            CapturedStep(self.update, self._state, config.precision, accelerator.device) if recorded else None
        )

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of steps in this round."""

    @abstractmethod
    def batches_from_here(self) -> Iterator[Any]:
        """The remaining batches of this round."""

    @abstractmethod
    def train_step(self, batches: Iterator[Any]) -> None:
        """Update the weights once: draw on the host, then call :meth:`apply`; adds to ``meter``."""

    @abstractmethod
    def update(self, *inputs: Tensor | None) -> None:
        """The part of a step on the device, and nothing else, as a CUDA graph may replace it."""

    @abstractmethod
    def learning_rate(self, step: int) -> float:
        """The learning rate of a step of this round."""

    @abstractmethod
    def evaluate(self, reading: Reading, lr: float) -> Record:
        """Evaluate on test data; return the record of this round, with ``reading`` from training."""

    @abstractmethod
    def record_of(self, fields: dict[str, Any]) -> Record:
        """Rebuild a record from the fields in a checkpoint."""

    def apply(self, *inputs: Tensor | None) -> None:
        """Call :meth:`update`, or replay it."""
        (self.captured or self.update)(*inputs)

    def averages(self) -> Iterable[Tensor]:
        """Averages of weights that a step changes."""
        return ()

    def train_epoch(self, on_step: OnStep | None, save: Callable[[], None]) -> Record:
        """Train the rest of the round, then evaluate; ``save`` is called when a checkpoint is due in between."""
        steps = self.steps
        batches = self.batches_from_here()
        self.network.train()
        started = last_reading = last_checkpoint = perf_counter()
        while self.step < steps:
            self.train_step(batches)
            self.step += 1
            now = perf_counter()
            if now - last_reading >= SECONDS_BETWEEN_READINGS:
                self._report(self.meter.read(), on_step)
                last_reading = perf_counter()
            if self.step < steps and self._agree(now - last_checkpoint >= self._settings.checkpoint_seconds):
                self._check_finite(self.meter.read())
                self.seconds += perf_counter() - started
                save()
                started = last_checkpoint = perf_counter()
        reading = self.meter.read(self.accelerator)
        lr = self.learning_rate(steps - 1)
        self.seconds += perf_counter() - started
        self._report(reading, on_step)
        record = self.evaluate(reading, lr)
        self.epochs.append(record)
        self.epoch, self.step, self.seconds = self.epoch + 1, 0, 0.0
        self.meter.reset()
        return record

    def diverged(self, step: int, lr: float, what: str = "training loss") -> DivergedError:
        """The error for ``what`` not being finite after ``step`` steps of this round."""
        return DivergedError(self.epoch, step, lr, what)

    def finish(self) -> None:
        """Put the weights that were evaluated last into the model, and set ``eval`` mode."""
        self.model.eval()

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on; all processes must call this, as each has sums of its own share."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "epochs": [asdict(record) for record in self.epochs],
            "meters": self.accelerator.gather(self.meter.as_row()[None]),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.step, self.seconds = state["epoch"], state["step"], state["seconds"]
        self.epochs = [self.record_of(record) for record in state["epochs"]]
        self.meter.restore(state["meters"][self.accelerator.process_index])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        bind_rate(self.optimizer.param_groups, self._rate)
        if self.captured is not None:
            self.captured.forget()  # the optimiser has other tensors now

    def close(self) -> None:
        """Turn the model back into a plain module."""
        if self.captured is not None:
            self.captured.forget()
        for name in ("forward", "_original_forward"):
            vars(self.model).pop(name, None)
        if self._own_forward is not None:
            self.model.forward = self._own_forward

    def set_learning_rate(self) -> None:
        """Set the learning rate of the coming step."""
        rate = self.learning_rate(self.step)
        if self._rate is not None:
            self._rate.fill_(rate)
            return
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _state(self) -> dict[str, Tensor]:
        return training_state(self.model, self.optimizer, self.averages(), self.meter.sums)

    def _report(self, reading: Reading, on_step: OnStep | None) -> None:
        self._check_finite(reading)
        if on_step is not None:
            on_step(self.epoch, self.step, reading.loss, reading.accuracy)

    def _check_finite(self, reading: Reading) -> None:
        if not isfinite(reading.loss):
            step = reading.finite_steps
            raise self.diverged(step, self.learning_rate(step))

    def _agree(self, due: bool) -> bool:
        """Whether a checkpoint is due in any process; all processes get the same answer."""
        if self.accelerator.num_processes == 1:
            return due
        if self.step % STEPS_BETWEEN_VOTES:
            return False
        votes = self.accelerator.gather(torch.tensor([due], device=self.accelerator.device))
        return bool(votes.any())


def go_through(
    run: Rounds[Record],
    rounds: int,
    files: RunFolder,
    fingerprint: dict[str, Any],
    precision: str,
    *,
    on_step: OnStep | None,
    on_epoch: Callable[[Record], None] | None,
) -> None:
    """Train all remaining rounds of ``run``; each writes a checkpoint and a line of the log."""
    main = run.accelerator.is_main_process
    checkpoint = files.load_checkpoint(fingerprint)
    if main:
        files.remove_halves()
    if checkpoint is not None:
        run.load_state_dict(checkpoint)
        if main:
            write_log(files.log, run.epochs)  # the log may have a round that the checkpoint does not

    def save() -> None:
        state = run.state_dict()
        if main:
            files.save_checkpoint({"fingerprint": fingerprint, **state})

    while run.epoch < rounds:
        with matrix_products(precision):
            record = run.train_epoch(on_step if main else None, save)
        save()
        if main:
            write_log(files.log, run.epochs)
        if on_epoch is not None and main:
            on_epoch(record)
    run.finish()


def write_log(path: Path, records: Sequence[Any]) -> None:
    """Rewrite the whole log. An appended one could end in half a line, or have an epoch that is then trained again.

    ``records`` are dataclasses, such as :class:`EpochRecord`.
    """
    text = "".join(dumps(asdict(record), allow_nan=False) + "\n" for record in records)
    write_atomically(path, lambda temporary: temporary.write_text(text))
