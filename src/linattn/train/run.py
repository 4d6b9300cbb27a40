"""The state of a training run and its steps."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from math import isfinite
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linattn.support.compiling import compile_blocks
from linattn.train.checkpoint import epochs_as_dicts
from linattn.train.config import TrainConfig
from linattn.train.ema import WeightAverage
from linattn.train.evaluate import evaluate
from linattn.train.loss import training_loss
from linattn.train.meter import Meter, Reading
from linattn.train.optimizer import create_optimizer
from linattn.train.records import DivergedError, EpochRecord
from linattn.train.schedule import learning_rate
from linattn.train.seeds import seed_step

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    from linattn.train.batches import Batches

OnStep = Callable[[int, int, float, float], None]

# Reading the loss waits for the device: ten times a second is enough for an eye and costs nothing that can be seen.
SECONDS_BETWEEN_READINGS = 0.1
# Processes must agree on the step of a checkpoint; to ask the others at every step would cost more than it brings.
STEPS_BETWEEN_VOTES = 50


class Run:
    """Weights, optimiser, averages, and how far they have come: ``epoch`` epochs and ``step`` steps of the next."""

    def __init__(self, model: nn.Module, batches: "Batches", config: TrainConfig, accelerator: "Accelerator") -> None:
        self.model, self.batches, self.config, self.accelerator = model, batches, config, accelerator
        self.epoch, self.step, self.seconds = 0, 0, 0.0
        self.epochs: list[EpochRecord] = []
        self.meter = Meter(accelerator.device)
        model.to(accelerator.device)
        if config.compile:
            compile_blocks(model)
        # Mixed precision is hung into the instance's forward: what stood there comes back in `close`.
        self._own_forward = vars(model).get("forward")
        self.optimizer: Any
        self.network, self.optimizer = accelerator.prepare(model, create_optimizer(model, config))
        self.average = None if config.ema_decay is None else WeightAverage(model, config.ema_decay)

    def train_epoch(self, on_step: OnStep | None, save: Callable[[], None]) -> EpochRecord:
        """The rest of the epoch, then its evaluation; ``save`` is called when a checkpoint is due on the way."""
        steps = self.batches.steps_per_epoch
        batches = self.batches.train(self.epoch, self.step)
        self.network.train()
        started = last_reading = last_checkpoint = perf_counter()
        while self.step < steps:
            self._train_step(batches)
            now = perf_counter()
            if now - last_reading >= SECONDS_BETWEEN_READINGS:
                self._report(self.meter.read(), on_step)
                last_reading = perf_counter()
            if self.step < steps and self._agree(now - last_checkpoint >= self.config.checkpoint_seconds):
                self._check_finite(self.meter.read())
                self.seconds += perf_counter() - started
                save()
                started = last_checkpoint = perf_counter()
        reading = self.meter.read(self.accelerator)
        lr = self._learning_rate(steps - 1)
        self.seconds += perf_counter() - started
        self._report(reading, on_step)
        with nullcontext() if self.average is None else self.average.lent_to(self.model):
            test = evaluate(self.model, self.batches.test(), self.accelerator)
        if not isfinite(test.loss):
            raise DivergedError(self.epoch, self.step, lr, "test loss")
        record = EpochRecord(self.epoch, lr, reading.loss, test.loss, test.accuracy, self.seconds)
        self.epochs.append(record)
        self.epoch, self.step, self.seconds, self.meter = self.epoch + 1, 0, 0.0, Meter(self.accelerator.device)
        return record

    def take_average(self) -> None:
        """Put the averaged weights, if there are any, into the model."""
        if self.average is not None:
            self.average.copy_to(self.model)
        self.model.eval()

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on; every process must come here, each has summed its own images."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "epochs": epochs_as_dicts(self.epochs),
            "meters": self.accelerator.gather(self.meter.as_row()[None]),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.step, self.seconds = state["epoch"], state["step"], state["seconds"]
        self.epochs = [EpochRecord(**record) for record in state["epochs"]]
        self.meter.restore(state["meters"][self.accelerator.process_index])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])

    def close(self) -> None:
        """Leave the model as a plain module."""
        for name in ("forward", "_original_forward"):
            vars(self.model).pop(name, None)
        if self._own_forward is not None:
            self.model.forward = self._own_forward

    def _train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        config = self.config
        # Before the batch is drawn: augmentation and dropout of this step depend on nothing but its number.
        seed_step(config.seed, self.epoch, self.step, self.accelerator.process_index)
        images, targets = next(batches)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(self.step)
        logits = self.network(images)
        loss = training_loss(logits, targets, config.label_smoothing)
        self.accelerator.backward(loss)
        if config.clip_norm is not None:
            self.accelerator.clip_grad_norm_(self.network.parameters(), config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.model)
        self.meter.add(loss, logits, targets)
        self.step += 1

    def _learning_rate(self, step: int) -> float:
        steps = self.batches.steps_per_epoch
        return learning_rate(self.epoch * steps + step, steps, self.config)

    def _report(self, reading: Reading, on_step: OnStep | None) -> None:
        self._check_finite(reading)
        if on_step is not None:
            on_step(self.epoch, self.step, reading.loss, reading.accuracy)

    def _check_finite(self, reading: Reading) -> None:
        if not isfinite(reading.loss):
            step = reading.finite_steps
            raise DivergedError(self.epoch, step, self._learning_rate(step))

    def _agree(self, due: bool) -> bool:
        """Whether any process finds a checkpoint due; all get the same answer."""
        if self.accelerator.num_processes == 1:
            return due
        if self.step % STEPS_BETWEEN_VOTES:
            return False
        votes = self.accelerator.gather(torch.tensor([due], device=self.accelerator.device))
        return bool(votes.any())
