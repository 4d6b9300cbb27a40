"""Training runs on images: their state and their steps."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from math import isfinite
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from linattn.lab.train.config import TrainConfig
from linattn.lab.train.ema import WeightAverage
from linattn.lab.train.energy import EnergyLoss
from linattn.lab.train.evaluate import evaluate
from linattn.lab.train.loss import training_loss
from linattn.lab.train.meter import Reading
from linattn.lab.train.records import EpochRecord
from linattn.lab.train.rounds import OnStep, Rounds
from linattn.lab.train.schedule import learning_rate
from linattn.support.seeds import seed_step

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    from linattn.lab.train.batches import Batches

__all__ = ["OnStep", "Run"]


class Run(Rounds[EpochRecord]):
    """A run of epochs over images, with an average of the weights if the config asks for one."""

    def __init__(self, model: nn.Module, batches: "Batches", config: TrainConfig, accelerator: "Accelerator") -> None:
        super().__init__(model, config, accelerator)
        self.batches, self.config = batches, config
        self.energy = EnergyLoss(model) if config.energy_loss else None
        self.average = None if config.ema_decay is None else WeightAverage(model, config.ema_decay)

    @property
    def steps(self) -> int:
        return self.batches.steps_per_epoch

    def batches_from_here(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.batches.train(self.epoch, self.step)

    def train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
        # Before the batch is drawn: augmentation and dropout of this step must depend only on its number.
        seed_step(self.config.seed, self.epoch, self.step, self.accelerator.process_index)
        images, targets = next(batches)
        self.set_learning_rate()
        self.meter.count(len(targets))
        self.apply(images, targets)

    def update(self, images: Tensor, targets: Tensor) -> None:  # type: ignore[override]
        """``images (b, C, H, W)``; ``targets (b,)`` or ``(b, classes)``."""
        config = self.config
        logits = self.network(images)
        loss = training_loss(logits, targets, config.label_smoothing)
        if self.energy is not None:
            loss = loss + config.energy_loss * self.energy.take()
        self.accelerator.backward(loss)
        if config.clip_norm is not None:
            self.accelerator.clip_grad_norm_(self.network.parameters(), config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.model)
        self.meter.add_batch(loss, logits, targets)

    def averages(self) -> Iterable[Tensor]:
        return () if self.average is None else self.average.average.values()

    def learning_rate(self, step: int) -> float:
        return learning_rate(self.epoch * self.steps + step, self.steps, self.config)

    def evaluate(self, reading: Reading, lr: float) -> EpochRecord:
        with nullcontext() if self.average is None else self.average.lent_to(self.model):
            test = evaluate(self.model, self.batches.test(), self.accelerator)
        if not isfinite(test.loss):
            raise self.diverged(self.step, lr, "test loss")
        return EpochRecord(self.epoch, lr, reading.loss, test.loss, test.accuracy, self.seconds)

    def record_of(self, fields: dict[str, Any]) -> EpochRecord:
        return EpochRecord(**fields)

    def finish(self) -> None:
        """Put the averaged weights, if there are any, into the model."""
        if self.average is not None:
            self.average.copy_to(self.model)
        super().finish()

    def close(self) -> None:
        if self.energy is not None:
            self.energy.remove()
        super().close()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"average": None if self.average is None else self.average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.average is not None:
            self.average.load_state_dict(state["average"])
