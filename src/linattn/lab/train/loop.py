"""Training on images: the losses, averages of weights, and runs that can be stopped at any moment."""

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from linattn.lab.train.accelerator import create_accelerator
from linattn.lab.train.batches import Batches
from linattn.lab.train.config import TrainConfig
from linattn.lab.train.rounds import OnStep, Plan, Reading, Rounds, complete, read
from linattn.support.checkpoint import RunFolder, model_digest
from linattn.support.extras import need
from linattn.support.options import OptionError

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

# What says where and how a run computes, but not what: a run may be resumed with other values.
_WITHOUT_EFFECT = ("output", "jobs", "where", "recipe", "graphs", "checkpoint_seconds", "device")


@dataclass(frozen=True)
class EpochRecord:
    """One epoch, counted from 0, with its evaluation on the test split; uses averaged weights if there are any.

    ``lr`` is the learning rate of its last step, ``train_loss`` the mean over its training images, with label smoothing
    and mixing, ``test_loss`` plain cross-entropy, ``top1`` the accuracy on the test images, in percent, and ``seconds``
    the time of training alone, without evaluation and files.
    """

    epoch: int
    lr: float
    train_loss: float
    test_loss: float
    top1: float
    seconds: float


@dataclass(frozen=True)
class TrainResult:
    """All epochs, the accuracy of the last one (of the best it would be a leak), and the time of training alone over
    all epochs, including those before a resume."""

    epochs: list[EpochRecord]
    top1: float
    seconds: float


def training_loss(logits: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    """``mean_i -sum_c t_ic log softmax(logits_i)_c``, in fp32 at least.

    For labels ``targets (b,)`` and s = label_smoothing over C classes, ``t_ic = (1 - s) [c = target_i] + s / C``.
    Targets ``(b, C)`` are used as they are: those of mixed images are smoothed already.
    """
    logits = logits.float() if logits.itemsize < 4 else logits
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing if targets.ndim == 1 else 0.0)


def sums_of(loss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """Summed loss, hits and number of images of a batch with mean ``loss``; targets are labels or weights."""
    right = logits.argmax(-1) == (targets.argmax(-1) if targets.ndim == 2 else targets)
    total = loss.detach().double() * len(targets)
    return torch.stack([total, right.sum().double(), torch.full_like(total, len(targets))])


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], accelerator: "Accelerator") -> Reading:
    """Mean cross-entropy and accuracy (percent) over ``batches``, in the accelerator's precision; sets ``eval`` mode.

    Each process evaluates its share of the images; the result is over all processes.
    """
    model.eval()
    sums, full = torch.zeros(3, dtype=torch.float64, device=accelerator.device), 0
    for images, targets in batches:
        full = max(full, len(images))
        with accelerator.autocast():
            # The last batch may be smaller: it is filled up, so that compiled code sees only one shape.
            logits = model(F.pad(images, (0, 0, 0, 0, 0, 0, 0, full - len(images))))[: len(images)]
        sums += sums_of(training_loss(logits, targets, label_smoothing=0.0), logits, targets)
    return read(sums, accelerator)


class WeightAverage:
    """``a <- d a + (1 - d) w`` after every step, for all parameters; ``a`` starts at the weights it is made from.

    Averages are stored beside the model and swapped with its weights for evaluation, so that there is no second model
    to compile or to keep in step; in place, as the optimiser, compiled code and buckets for other processes refer to
    these very tensors. Buffers, such as the statistics of a batch norm, are averages already.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.weights = [parameter.detach() for parameter in model.parameters()]
        self.values = [weight.clone() for weight in self.weights]
        self._average = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self) -> None:
        self._average(self.values, self.weights, 1)

    def swap(self) -> None:
        """Exchange weights and averages, to the last bit."""
        for weight, value in zip(self.weights, self.values, strict=True):
            kept = weight.clone()
            weight.copy_(value)
            value.copy_(kept)


def check_energy(weight: float, among: Iterable[object]) -> None:
    """Raise an OptionError if ``weight`` is not 0 and no mechanism or module ``among`` these has an energy loss."""
    if weight and not any(hasattr(each, "energy_loss") for each in among):
        needed = "needs a mechanism that reports the energy it cuts off, such as mirror; for others it must be 0"
        raise OptionError("energy_loss", f"{needed}, got {weight:g}")


class EnergyLoss:
    """The mean of ``energy_loss(q, k)`` over all mechanisms of a model that have one, such as ``mirror``.

    It is collected in each forward pass in training; :meth:`take` returns that of the last pass, once.

    Example:
        >>> from linattn.models.vision import create_vit
        >>> model = create_vit("digits", "mirror")
        >>> energy, _ = EnergyLoss(model), model(torch.randn(2, 1, 8, 8))
        >>> loss = energy.take()
        >>> 0 < loss.item() < 1, loss.requires_grad
        (True, True)
    """

    def __init__(self, model: nn.Module) -> None:
        self._found: list[Tensor] = []
        having = [module for module in model.modules() if hasattr(module, "energy_loss")]
        self._hooks = [module.register_forward_pre_hook(self._add, with_kwargs=True) for module in having]
        # With gradient checkpointing the backward pass runs blocks again, which adds losses that are never taken.
        self._hooks.append(model.register_forward_pre_hook(lambda *_: self._found.clear()))

    def take(self) -> Tensor | float:
        """Return the loss and forget it; 0 if no mechanism has one."""
        found, self._found[:] = self._found[:], []
        return torch.stack(found).mean() if found else 0.0

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _add(self, mechanism: Any, inputs: tuple[Tensor, ...], options: Mapping[str, Any]) -> None:
        if mechanism.training and torch.is_grad_enabled():
            given = {name: options.get(name) for name in ("key_mask", "cu_seqlens")}
            self._found.append(mechanism.energy_loss(*inputs[:2], **given))


class Run(Rounds[EpochRecord]):
    """A run of epochs over images, with an average of the weights if the config asks for one."""

    def __init__(self, model: nn.Module, batches: Batches, config: TrainConfig, accelerator: "Accelerator") -> None:
        steps = batches.steps_per_epoch
        plan = Plan(steps, config.epochs * steps, round(config.warmup_epochs * steps))
        super().__init__(model, config, accelerator, plan, EpochRecord)
        self.batches = batches
        self.energy = EnergyLoss(model) if config.energy_loss else None
        self.average = None if config.ema_decay is None else WeightAverage(model, config.ema_decay)
        self.averages = [] if self.average is None else self.average.values

    def batches_from_here(self) -> Generator[tuple[Tensor, Tensor], None, None]:
        first, step = self.epoch, self.step
        for epoch in range(first, self.config.epochs):
            yield from self.batches.train(epoch, step if epoch == first else 0)

    def place(self, step: int) -> tuple[int, int]:
        return self.epoch, step

    def backward(self, images: Tensor, targets: Tensor) -> Tensor:
        """``images (b, C, H, W)``; ``targets (b,)`` or ``(b, classes)``."""
        logits = self.network(images)
        loss = training_loss(logits, targets, self.config.label_smoothing)
        if self.energy is not None:
            loss = loss + self.config.energy_loss * self.energy.take()
        self.accelerator.backward(loss)
        return sums_of(loss, logits, targets)

    def update(self, *inputs: Tensor) -> None:
        super().update(*inputs)
        if self.average is not None:
            self.average.update()

    def evaluate(self, reading: Reading, lr: float) -> EpochRecord:
        self.finish()
        test = evaluate(self.model, self.batches.test(), self.accelerator)
        self.check_finite(test.loss, "test loss")
        if self.average is not None:
            self.average.swap()
        return EpochRecord(self.epoch, lr, reading.loss, test.loss, test.accuracy, self.seconds)

    def finish(self) -> None:
        if self.average is not None:
            self.average.swap()
        super().finish()

    def result(self) -> TrainResult:
        return TrainResult(self.records, self.records[-1].top1, sum(record.seconds for record in self.records))

    def close(self) -> None:
        if self.energy is not None:
            self.energy.remove()
        super().close()


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
    A stopped run may be resumed with CUDA graphs or without; graphs round the learning rate to fp32.

    Args:
        model: maps images ``(b, C, H, W)`` to logits ``(b, classes)``.
        batches: this process's batches from ``linattn.lab.train.batches.create_batches``, on the device of the config.
        options: the options of the model's mechanism; a run with other options is not resumed.
        on_step: called with the epoch, the steps done in it, and mean loss and accuracy (percent) of the epoch so far:
            at the end of each epoch and at most ten times a second, as reading the numbers waits for the device.
        on_epoch: called with the record of each finished epoch, once it is on disk.
        accelerator: that of ``create_accelerator(config)``, if the caller needs it too.

    Raises ``ResumeError`` if the folder holds a different run, and ``DivergedError`` if the loss is not finite.
    """
    need("training", "accelerate")
    accelerator = accelerator or create_accelerator(config)
    files = RunFolder(Path(folder))
    # Of the device only the kind counts: another GPU can continue a run, but a CPU rounds differently.
    run_of = {name: value for name, value in config.values().items() if name not in _WITHOUT_EFFECT}
    run_of |= {"device": config.place().type, "model": model_digest(model), "options": dict(options)}
    run_of |= {"steps_per_epoch": batches.steps_per_epoch, "processes": accelerator.num_processes}
    finished = files.load_result(run_of)
    if finished is not None:
        model.to(accelerator.device).load_state_dict(files.load_weights())
        model.eval()
        return TrainResult(**finished | {"epochs": [EpochRecord(**record) for record in finished["epochs"]]})
    run = Run(model, batches, config, accelerator)
    result: TrainResult = complete(run, files, run_of, on_step=on_step, on_record=on_epoch)
    return result
