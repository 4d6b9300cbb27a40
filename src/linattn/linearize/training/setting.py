"""What both stages of training are told: options, batches by their number, where to compute, whom to tell."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linattn.support.options import OptionError
from linattn.train.checkpoint import RunFolder
from linattn.train.checks import check_integer, check_number
from linattn.train.progress import step_bar
from linattn.train.schedule import warmed_cosine

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

Batch = Mapping[str, Tensor]
"""Arguments of the model by name: ``input_ids (B, T)``, ``attention_mask``, ``pixel_values``, ..."""
Batches = Callable[[int], Batch]
"""The batch of a step. A function of its number, so that a run that is resumed sees what it would have seen."""
Report = Callable[[int, int, str], None]
"""Called with steps done, steps in all and how it stands, in words."""


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """What decides the outcome of a stage, with how often it is written down."""

    steps: int = 300
    tokens: int | None = None
    """Tokens to train on, in the place of ``steps``; rounded up to whole steps."""
    batch_size: int = 8
    """Sequences of a step, over all processes together."""
    length: int | None = None
    """Tokens of a sequence; None: what the model was made for, at most 1024."""
    lr: float = 1e-2
    """Highest learning rate; a twentieth of the steps lead up to it, the others down to a hundredth of it."""
    clip_norm: float | None = 1.0
    """Longest gradient; None: not clipped."""
    recall_share: float = 0.0
    """Of a text: share of the sequences that end with passages repeated from their own earlier text."""
    seed: int = 0
    checkpoint_steps: int = 100
    """Steps between two checkpoints. The outcome does not depend on it."""

    def check(self) -> None:
        """Raise ``OptionError`` for the first field that makes no sense."""
        for name in ("steps", "batch_size", "checkpoint_steps"):
            check_integer(name, getattr(self, name), 1)
        for name, least in (("tokens", 1), ("length", 2)):  # of one token nothing is predicted
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least)
        check_integer("seed", self.seed, 0)
        check_number("lr", self.lr, above=0)
        check_number("recall_share", self.recall_share, least=0, most=1)
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, above=0)

    def steps_of(self, length: int | None) -> int:
        """Steps in all, with sequences of ``length`` tokens."""
        if self.tokens is None:
            return self.steps
        if length is None:
            raise OptionError("tokens", "needs a length to be counted in steps; give steps, or a length")
        return -(-self.tokens // (self.batch_size * length))

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of a step."""
        return warmed_cosine(step, steps, max(1, steps // 20), self.lr, self.lr / 100)

    def fingerprint(self) -> dict[str, Any]:
        found = {name: value for name, value in asdict(self).items() if name != "checkpoint_steps"}
        if not self.recall_share:
            del found["recall_share"]  # runs from before there was one go on
        return found


def call(model: nn.Module, batch: Batch, **options: Any) -> Any:
    """The model's output; nothing is cached."""
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
    """A core that can learn: 16 bits would round small steps away. One in fp64 stays so."""
    narrow = any(parameter.dtype.itemsize < 4 for parameter in core.parameters())
    return core.float() if narrow else core


def is_main(accelerator: "Accelerator | None") -> bool:
    return accelerator is None or bool(accelerator.is_main_process)


def device_of(model: nn.Module, accelerator: "Accelerator | None") -> torch.device:
    """Where to compute: the accelerator's device, to which the model moves, else that of the model."""
    if accelerator is not None:
        model.to(accelerator.device)
    return next(model.parameters()).device


@dataclass(frozen=True, eq=False)
class Setting:
    """What a stage works with, beside the model and its options."""

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
    """A loss is no number any more."""

    def __init__(self, what: str, step: int) -> None:
        super().__init__(
            f"the loss of {what} is not finite at step {step}. A lower lr or a smaller clip_norm helps; "
            "what was finished before is kept"
        )


@contextmanager
def stage_bar(name: str, *, hidden: bool) -> Iterator[Report]:
    """A bar on stderr that goes away at the end."""
    with step_bar(1, None, hidden=hidden) as (progress, task):

        def report(done: int, steps: int, words: str) -> None:
            progress.update(task, completed=done, total=steps, description=f"{name}  {words}")

        yield report
