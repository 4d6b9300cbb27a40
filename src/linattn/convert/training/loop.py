"""The loop of both stages. Each step depends only on the weights and its number, so a killed run can be resumed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from linattn.convert.convert import linearized_layers
from linattn.ops.shared.call import compute_dtype
from linattn.support.checkpoint import RunFolder
from linattn.support.config import Config, option
from linattn.support.options import OptionError
from linattn.support.progress import Report
from linattn.support.schedule import warmed_cosine
from linattn.support.seeds import seed_step

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

Batch = Mapping[str, Tensor]
"""Arguments of the model by name: ``input_ids (B, T)``, ``attention_mask``, ``pixel_values``, ..."""
Batches = Callable[[int], Batch]
"""Returns the batch of a step. Since it depends on the number alone, a resumed run sees the same batches."""

SECONDS_BETWEEN_LOOKS = 0.2  # since reading a loss waits for the device


class UnstableError(RuntimeError):
    """Raised when a loss is not finite."""

    def __init__(self, what: str, step: int) -> None:
        super().__init__(
            f"the loss of {what} is not finite at step {step}. A lower lr or a smaller clip_norm helps; "
            "what was finished before is kept"
        )


@dataclass(frozen=True, kw_only=True)
class StageOptions(Config):
    """Options of a stage: those that decide its outcome, and how often checkpoints are written."""

    steps: int = option(300, "Training steps.", least=1)
    tokens: int | None = option(None, "Tokens to train on, instead of steps; rounded up to whole steps.", least=1)
    batch_size: int = option(8, "Sequences per step, over all processes together.", least=1)
    length: int | None = option(
        None, "Tokens of a sequence.", least=2, default_text="what the model was made for, at most 1024"
    )
    lr: float = option(
        1e-2, "Highest learning rate; it rises for a twentieth of the steps, then falls to a hundredth of it.", above=0
    )
    clip_norm: float | None = option(1.0, "Largest norm of a gradient; none: not clipped.", above=0)
    recall_share: float = option(
        0.0, "Share of the sequences that end with passages repeated from their own earlier text.", least=0, most=1
    )
    scale_factor: float = option(
        1.0, "Factor of the learning rate for scales learned as logarithms (log_weight, log_alpha).", above=0
    )
    seed: int = option(0, "Seed of all that is drawn.", least=0)
    checkpoint_steps: int = option(100, "Steps between two checkpoints.", least=1, affects=False)

    def steps_of(self, length: int | None) -> int:
        """Number of steps in all, with sequences of ``length`` tokens."""
        if self.tokens is None:
            return self.steps
        if length is None:
            raise OptionError("tokens", "needs a length to be counted in steps; give steps, or a length")
        return -(-self.tokens // (self.batch_size * length))


class StageRun(ABC):
    """Base of a stage's training loop: parts with an optimiser each, and the losses of the steps done.

    Args:
        parts: modules to train, by name, each with a gradient norm and an optimiser of its own; parts without
            parameters are only measured.
        batches, folder, progress, accelerator: as in ``linattn.convert.transfer.transfer``.
    """

    number: ClassVar[int]  # of the stage; it separates the random numbers of the two

    def __init__(
        self,
        model: nn.Module,
        parts: Mapping[str, nn.Module],
        options: StageOptions,
        *,
        batches: Batches,
        folder: Path | None,
        progress: Report | None,
        accelerator: "Accelerator | None",
    ) -> None:
        if accelerator is not None:
            model.to(accelerator.device)
        self.model, self.parts, self.options = model, nn.ModuleDict(parts), options
        self.batches, self.progress, self.accelerator = batches, progress, accelerator
        self.files = None if folder is None else RunFolder(Path(folder))
        self.device = next(model.parameters()).device
        names = {parameter: name for name, parameter in model.named_parameters()}
        # One kernel for all weights of a part: parts are small and many.
        fused = True if self.device.type == "cuda" else None
        self.optimizers = {
            name: AdamW(groups, lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0, fused=fused)
            for name, part in parts.items()
            if (groups := _groups(part, names, options.scale_factor))
        }
        self.steps = options.steps_of(options.length) if self.optimizers else 0
        self._losses: list[list[float]] = []  # of each step; those not yet read from the device wait
        self._waiting: list[Tensor] = []

    @abstractmethod
    def step(self) -> Tensor:
        """Update all parts once; returns the loss of each, ``(parts,)``, on the device."""

    @abstractmethod
    def words(self, losses: Sequence[float]) -> str:
        """Say in words how the training goes."""

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """The outcome that is written when all steps are done, ready for JSON."""

    @property
    def done(self) -> int:
        return len(self._losses) + len(self._waiting)

    def go(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """Run all steps, or those that are left; ``identity`` tells this run from others."""
        told: dict[str, Any] = getattr(self.batches, "fingerprint", dict)()
        processes = 1 if self.accelerator is None else self.accelerator.num_processes
        run = self.options.values(affecting=True) | {**identity, "batches": told, "processes": processes}
        files, main, looked, lr = self.files, is_main(self.accelerator), perf_counter(), self.options.lr
        if files is not None and main:
            files.remove_halves()  # of a run that was killed
        if files is not None and (finished := files.load_result(run)) is not None:
            self.parts.load_state_dict(files.load_weights())
            return finished
        state = None if files is None else files.load_checkpoint(run)
        if state is not None:
            self._losses = state["losses"]
            self.parts.load_state_dict(state["parts"])
            for name, optimizer in self.optimizers.items():
                optimizer.load_state_dict(state["optimizers"][name])
        while self.done < self.steps:
            seed_step(self.options.seed, self.number, self.done)
            rate = warmed_cosine(self.done, self.steps, max(1, self.steps // 20), lr, lr / 100)
            for optimizer in self.optimizers.values():
                for group in optimizer.param_groups:
                    group["lr"] = rate * group["factor"]
            self._waiting.append(self.step())
            if self.progress is not None and perf_counter() - looked > SECONDS_BETWEEN_LOOKS:
                self.progress(self.done, self.steps, self.words(self.losses()[-1]))
                looked = perf_counter()
            if files is not None and self.done % self.options.checkpoint_steps == 0 and self.done < self.steps:
                losses = self.losses()  # raises before a broken state could replace a good one
                optimizers = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
                state = {"losses": losses, "parts": self.parts.state_dict(), "optimizers": optimizers}
                if main:
                    files.save_checkpoint(state | {"fingerprint": run})
        self.losses()  # raises if one of the last losses is not finite
        result = self.result()
        if files is not None and main:
            files.save_result(self.parts, result, run)
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()
        return result

    def batch(self) -> Batch:
        """This process's rows of the next step's batch, on its device."""
        return shared(self.batches(self.done), self.device, self.accelerator)

    def update(self, name: str) -> None:
        """Take one step of a part's optimiser with the present gradients, then drop these."""
        parameters = list(self.parts[name].parameters())
        average_gradients(parameters, self.accelerator)
        if self.options.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.options.clip_norm)
        self.optimizers[name].step()
        self.optimizers[name].zero_grad()

    def losses(self) -> list[list[float]]:
        """The losses of all steps, step by step; raises if one is not finite."""
        rows, self._waiting = torch.stack(self._waiting).tolist() if self._waiting else [], []
        for row in rows:
            for name, value in zip(self.parts, row, strict=True):
                if not isfinite(value):
                    raise UnstableError(name, len(self._losses))
            self._losses.append(row)
        return self._losses


def _groups(part: nn.Module, names: Mapping[nn.Parameter, str], scale_factor: float) -> list[dict[str, Any]]:
    """Group parameters by the ``factor`` of their learning rate: scales learned as logarithms have their own."""
    found: dict[float, list[nn.Parameter]] = {}
    for parameter in part.parameters():
        is_scale = names[parameter].rpartition(".")[2].startswith("log_")
        found.setdefault(scale_factor if is_scale else 1.0, []).append(parameter)
    return [{"params": found[own], "factor": own} for own in sorted(found, key=lambda own: own != 1.0)]


def call(model: nn.Module, batch: Batch, **options: Any) -> Any:
    """Call the model on a batch, without a cache."""
    parameters = signature(model.forward).parameters
    uncached = {"use_cache": False} if "use_cache" in parameters else {}
    return model(**batch, **uncached, **options)


def shared(batch: Batch, device: torch.device, accelerator: "Accelerator | None" = None) -> Batch:
    """This process's rows of a batch, on its device."""
    if accelerator is not None and accelerator.num_processes > 1:
        rank, processes = accelerator.process_index, accelerator.num_processes
        rows = len(next(iter(batch.values())))
        if rows % processes:
            raise OptionError("batch_size", f"must be a multiple of the {processes} processes, got {rows}")
        batch = {name: value[rank::processes] for name, value in batch.items()}
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def average_gradients(parameters: Sequence[nn.Parameter], accelerator: "Accelerator | None") -> None:
    """Average the gradients of all processes in one message; each process saw equally many rows."""
    if accelerator is None or accelerator.num_processes == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    dtype = compute_dtype(*gradients)
    mean = accelerator.reduce(torch.cat([gradient.flatten().to(dtype) for gradient in gradients]), "mean")
    for gradient, part in zip(gradients, mean.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def is_main(accelerator: "Accelerator | None") -> bool:
    return accelerator is None or bool(accelerator.is_main_process)


def in_fp32(core: nn.Module) -> nn.Module:
    """Convert a core to fp32 so that it can learn: 16 bits would round small steps away. fp64 stays fp64."""
    narrow = any(parameter.dtype.itemsize < 4 for parameter in core.parameters())
    return core.float() if narrow else core


@contextmanager
def in_eval(model: nn.Module) -> Iterator[torch.device]:
    """Eval mode, restored on exit; yields the device. With dropout the teacher would be another one at each step."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield next(model.parameters()).device
    finally:
        for module, training in before.items():
            module.training = training


@contextmanager
def in_stage(model: nn.Module) -> Iterator[None]:
    """Eval mode of a converted model; on exit its own parameters take gradients as before, and hold none."""
    if not linearized_layers(model):
        raise ValueError("the model has no converted layers: call linattn.convert.convert.convert first")
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with in_eval(model):
            yield
    finally:
        for parameter, wanted in before:
            parameter.requires_grad_(wanted)
            parameter.grad = None


@contextmanager
def quiet(model: nn.Module) -> Iterator[torch.device]:
    """Eval mode without gradients, to evaluate a model; yields the device of its weights."""
    with in_eval(model) as device, torch.no_grad():
        yield device
