"""Training on images: the loss, a step, an epoch's record, and a run that can be stopped at any moment."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.lab.train.accelerator import check_accelerator, create_accelerator
from linattn.lab.train.batches import Batches
from linattn.lab.train.config import TrainConfig, learning_rate
from linattn.lab.train.ema import WeightAverage
from linattn.lab.train.energy import EnergyLoss
from linattn.lab.train.meter import Meter, Reading
from linattn.lab.train.rounds import DivergedError, OnStep, Rounds, go_through
from linattn.support.checkpoint import ResumeError, RunFolder, model_digest
from linattn.support.extras import need
from linattn.support.seeds import seed_step

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

__all__ = ["DivergedError", "EpochRecord", "ResumeError", "Run", "TrainResult", "evaluate", "train", "training_loss"]
# What says where and how a run computes, but not what: a run may be resumed with other values.
_WITHOUT_EFFECT = ("output", "jobs", "where", "recipe", "graphs", "checkpoint_seconds", "device")


@dataclass(frozen=True)
class EpochRecord:
    """One epoch, counted from 0, with its evaluation on the test split; uses averaged weights if there are any."""

    epoch: int
    lr: float
    """Learning rate of the epoch's last step."""
    train_loss: float
    """Mean over the epoch's training images, with label smoothing and mixing."""
    test_loss: float
    """Plain cross-entropy."""
    top1: float
    """Accuracy on the test images, in percent."""
    seconds: float
    """Time of training alone; evaluation and files are not counted."""


@dataclass(frozen=True)
class TrainResult:
    epochs: list[EpochRecord]
    top1: float
    """Accuracy of the last epoch, not of the best: to pick an epoch by test data would be a leak."""
    seconds: float
    """Time of training alone over all epochs, including those before a resume."""

    @classmethod
    def of(cls, epochs: list[EpochRecord]) -> Self:
        return cls(list(epochs), epochs[-1].top1, sum(record.seconds for record in epochs))


def training_loss(logits: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    """``mean_i -sum_c t_ic log softmax(logits_i)_c``, in fp32 at least.

    For labels ``targets (b,)`` and s = label_smoothing over C classes, ``t_ic = (1 - s) [c = target_i] + s / C``.
    Targets ``(b, C)`` are used as they are: those of mixed images are smoothed already.
    """
    logits = logits.float() if logits.itemsize < 4 else logits
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing if targets.ndim == 1 else 0.0)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], accelerator: "Accelerator") -> Reading:
    """Mean cross-entropy and accuracy (percent) over ``batches``, in the accelerator's precision; sets ``eval`` mode.

    Each process evaluates its share of the images; the result is over all processes.
    """
    model.eval()
    meter = Meter(accelerator.device)
    full = 0
    for images, targets in batches:
        full = max(full, len(images))
        with accelerator.autocast():
            # The last batch may be smaller: it is filled up, so that compiled code sees only one shape.
            logits = model(F.pad(images, (0, 0, 0, 0, 0, 0, 0, full - len(images))))[: len(images)]
        meter.add(training_loss(logits, targets, label_smoothing=0.0), logits, targets)
    return meter.read(accelerator)


class Run(Rounds[EpochRecord]):
    """A run of epochs over images, with an average of the weights if the config asks for one."""

    def __init__(self, model: nn.Module, batches: Batches, config: TrainConfig, accelerator: "Accelerator") -> None:
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
        return super().state_dict() | {"average": None if self.average is None else self.average.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.average is not None:
            self.average.load(state["average"])


def train(
    model: nn.Module,
    batches: Batches,
    config: TrainConfig,
    folder: Path,
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    on_step: OnStep | None = None,
    on_epoch: Callable[[EpochRecord], None] | None = None,
    accelerator: "Accelerator | None" = None,
) -> TrainResult:
    """Train ``model``, or resume the run in ``folder`` where it was stopped; a finished run is returned at once.

    Afterwards the model is in ``eval`` mode and has the weights that were evaluated last: the averaged ones with
    ``ema_decay``, else its own. ``folder`` has them as ``weights.pt``, beside ``result.json`` and ``log.jsonl``.

    A step depends only on the weights, the optimiser, the seed and its own number, so that a run that was killed and
    resumed ends in the same weights as one that was not. For that the model must have the same first weights: seed
    torch before creating it. On a CPU this holds to the last bit, on a GPU as far as its kernels add in a fixed order.
    Steps that are replayed as CUDA graphs draw the same random numbers as others, and a stopped run may be resumed with
    graphs or without; the only difference is that graphs round the learning rate to fp32.

    Args:
        model: maps images ``(b, C, H, W)`` to logits ``(b, classes)``.
        batches: this process's batches from ``linattn.lab.train.batches.create_batches``, on the device of the config.
        folder: a folder for this run alone.
        options: the options of the model's mechanism; a run with other options is not resumed.
        on_step: called with the epoch, the steps done in it, and mean loss and accuracy (percent) of the epoch so far:
            at the end of each epoch and at most ten times a second, as reading the numbers waits for the device.
        on_epoch: called with the record of each finished epoch, once it is on disk.
        accelerator: an accelerator from ``create_accelerator``, if the caller needs it too (None: create one).

    Raises:
        ResumeError: the folder holds a different run; the message says what differs.
        DivergedError: the loss is not finite; the message says where.
    """
    need("training", "accelerate")
    accelerator = accelerator or create_accelerator(config)
    check_accelerator(accelerator, config)
    files = RunFolder(Path(folder))
    # Of the device only the kind counts: another GPU can continue a run, but a CPU rounds differently.
    run_of = {name: value for name, value in config.values().items() if name not in _WITHOUT_EFFECT}
    run_of |= {"device": config.place().type, "model": model_digest(model), "options": dict(options)}
    run_of |= {"steps_per_epoch": batches.steps_per_epoch, "processes": accelerator.num_processes}
    finished = files.load_result(run_of)
    if finished is not None:
        model.to(accelerator.device).load_state_dict(files.load_weights())
        model.eval()
        return TrainResult.of([EpochRecord(**record) for record in finished["epochs"]])
    run = Run(model, batches, config, accelerator)
    try:
        go_through(run, config.epochs, files, run_of, config.precision, on_step=on_step, on_epoch=on_epoch)
        result = TrainResult.of(run.epochs)
        if accelerator.is_main_process:
            files.save_result(model, asdict(result), run_of)
        accelerator.wait_for_everyone()
    finally:
        run.close()
    return result
