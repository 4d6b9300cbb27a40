"""The setting of a stage of training: options, batches by number, devices and progress."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linattn.support.checkpoint import RunFolder
from linattn.support.checks import check_integer, check_number
from linattn.support.options import OptionError
from linattn.support.progress import step_bar
from linattn.support.schedule import warmed_cosine

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

Batch = Mapping[str, Tensor]
"""Arguments of the model by name: ``input_ids (B, T)``, ``attention_mask``, ``pixel_values``, ..."""
Batches = Callable[[int], Batch]
"""Returns the batch of a step. Since it depends on the number alone, a resumed run sees the same batches."""
Report = Callable[[int, int, str], None]
"""Called with the steps done, the steps in all, and words that say how the training goes."""


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """Options of a stage: those that decide its outcome, and how often checkpoints are written."""

    steps: int = 300
    tokens: int | None = None
    """Tokens to train on, instead of ``steps``; rounded up to whole steps."""
    batch_size: int = 8
    """Sequences per step, over all processes together."""
    length: int | None = None
    """Tokens of a sequence; None: what the model was made for, at most 1024."""
    lr: float = 1e-2
    """Highest learning rate; it rises for a twentieth of the steps, then falls to a hundredth of this value."""
    clip_norm: float | None = 1.0
    """Largest norm of a gradient; None: not clipped."""
    recall_share: float = 0.0
    """For a text: share of the sequences that end with passages repeated from their own earlier text."""
    seed: int = 0
    checkpoint_steps: int = 100
    """Steps between two checkpoints. The outcome does not depend on it."""

    def check(self) -> None:
        """Raise ``OptionError`` for the first field that is invalid."""
        for name in ("steps", "batch_size", "checkpoint_steps"):
            check_integer(name, getattr(self, name), 1)
        for name, least in (("tokens", 1), ("length", 2)):  # with one token there is nothing to predict
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least)
        check_integer("seed", self.seed, 0)
        check_number("lr", self.lr, above=0)
        check_number("recall_share", self.recall_share, least=0, most=1)
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, above=0)

    def steps_of(self, length: int | None) -> int:
        """Number of steps in all, with sequences of ``length`` tokens."""
        if self.tokens is None:
            return self.steps
        if length is None:
            raise OptionError("tokens", "needs a length to be counted in steps; give steps, or a length")
        return -(-self.tokens // (self.batch_size * length))

    def rate(self, step: int, steps: int) -> float:
        """Learning rate at a step."""
        return warmed_cosine(step, steps, max(1, steps // 20), self.lr, self.lr / 100)

    def fingerprint(self) -> dict[str, Any]:
        found = {name: value for name, value in asdict(self).items() if name != "checkpoint_steps"}
        if not self.recall_share:
            del found["recall_share"]  # so that runs from before this option existed can go on
        return found


def call(model: nn.Module, batch: Batch, **options: Any) -> Any:
    """Call the model on a batch, without a cache."""
    parameters = signature(model.forward).parameters
    quiet = {"use_cache": False} if "use_cache" in parameters else {}
    return model(**batch, **quiet, **options)


def shared(batch: Batch, device: torch.device, accelerator: "Accelerator | None") -> Batch:
    """This process's rows of a batch, on its device."""
    if accelerator is not None and accelerator.num_processes > 1:
        rank, processes = accelerator.process_index, accelerator.num_processes
        rows = len(next(iter(batch.values())))
        if rows % processes:
            raise OptionError("batch_size", f"must be a multiple of the {processes} processes, got {rows}")
        batch = {name: value[rank::processes] for name, value in batch.items()}
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def in_fp32(core: nn.Module) -> nn.Module:
    """Convert a core to fp32 so that it can learn: 16 bits would round small steps away. fp64 stays fp64."""
    narrow = any(parameter.dtype.itemsize < 4 for parameter in core.parameters())
    return core.float() if narrow else core


def is_main(accelerator: "Accelerator | None") -> bool:
    return accelerator is None or bool(accelerator.is_main_process)


def device_of(model: nn.Module, accelerator: "Accelerator | None") -> torch.device:
    """The device to compute on: the accelerator's, to which the model is moved, or else the model's own."""
    if accelerator is not None:
        model.to(accelerator.device)
    return next(model.parameters()).device


@dataclass(frozen=True, eq=False)
class Setting:
    """What a stage works with, apart from the model and its options."""

    batches: Batches
    device: torch.device
    files: RunFolder | None
    accelerator: "Accelerator | None" = None
    progress: Report | None = None

    @classmethod
    def of(
        cls, model: nn.Module, batches: Batches, folder: Path | None, accelerator: Any, progress: Report | None
    ) -> "Setting":
        device, files = device_of(model, accelerator), None if folder is None else RunFolder(Path(folder))
        return cls(batches, device, files, accelerator, progress)

    @property
    def processes(self) -> int:
        return 1 if self.accelerator is None else int(self.accelerator.num_processes)

    def batch(self, step: int) -> Batch:
        """This process's rows of a step's batch, on its device."""
        return shared(self.batches(step), self.device, self.accelerator)


class UnstableError(RuntimeError):
    """Raised when a loss is not finite."""

    def __init__(self, what: str, step: int) -> None:
        super().__init__(
            f"the loss of {what} is not finite at step {step}. A lower lr or a smaller clip_norm helps; "
            "what was finished before is kept"
        )


@contextmanager
def stage_bar(name: str, *, hidden: bool) -> Iterator[Report]:
    """A progress bar on stderr that disappears at the end."""
    with step_bar(1, None, hidden=hidden) as (progress, task):

        def report(done: int, steps: int, words: str) -> None:
            progress.update(task, completed=done, total=steps, description=f"{name}  {words}")

        yield report
