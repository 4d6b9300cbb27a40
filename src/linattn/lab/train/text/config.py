"""The config of training language models."""

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from linattn.lab.train.computing import Computing
from linattn.support.config import Config, option
from linattn.support.options import OptionError, check_device, check_graphs
from linattn.support.schedule import Schedule

BY_RECIPE = "by --recipe"
AnyConfig = TypeVar("AnyConfig", bound=Config)


@dataclass(frozen=True, kw_only=True)
class Budget(Computing):
    """How long and how language models are trained, whatever the learning rate and the seed."""

    steps: int = option(1000, "Updates of the weights.", least=1, group="Training", default_text=BY_RECIPE)
    batch_size: int = option(
        32, "Sequences of a step, over all processes.", least=1, group="Training", default_text=BY_RECIPE
    )
    accumulation: int = option(
        1, "Compute a step in so many parts, to save memory.", least=1, group="Training", rare=True
    )
    min_lr: float = option(
        1e-5, "Learning rate of the last step.", least=0, group="Training", rare=True, default_text=BY_RECIPE
    )
    warmup_steps: int = option(
        100, "Steps in which the learning rate rises.", least=0, group="Training", rare=True, default_text=BY_RECIPE
    )
    schedule: Schedule = option(
        "cosine", "How the learning rate falls: cosine or linear.", group="Training", rare=True, default_text=BY_RECIPE
    )
    weight_decay: float = option(
        0.1, "Weight decay of matrices; embeddings, norms, biases and a mechanism's own parameters do not decay.",
        least=0, group="Training", rare=True, default_text=BY_RECIPE,
    )  # fmt: skip
    betas: tuple[float, float] = option((0.9, 0.95), "Betas of AdamW.", least=0, below=1, hidden=True)
    eps: float = option(1e-8, "Added to the denominator of AdamW's step.", above=0, hidden=True)
    clip_norm: float | None = option(
        1.0, "Gradients longer than this are scaled down; none: not clipped.", least=0, group="Training", rare=True
    )
    eval_every: int = option(0, "Steps between evaluations; 0: one at the end.", least=0, group="Training", rare=True)
    eval_batch_size: int | None = option(
        None, "Sequences evaluated at a time.", least=1, group="Training", rare=True, default_text="--batch-size"
    )

    @property
    def round_steps(self) -> int:
        """Steps from one evaluation to the next."""
        return min(self.eval_every, self.steps) or self.steps

    @property
    def rounds(self) -> int:
        return -(-self.steps // self.round_steps)

    def check(self) -> None:
        super().check()
        if self.batch_size % self.accumulation:
            raise OptionError("accumulation", f"must divide batch_size = {self.batch_size}, got {self.accumulation}")
        if self.warmup_steps > self.steps:
            raise OptionError("warmup_steps", f"must not exceed steps = {self.steps}, got {self.warmup_steps}")


@dataclass(frozen=True, kw_only=True)
class TextConfig(Budget):
    """How to train a language model; the same config and seed on the same kind of device give the same weights.

    Example:
        >>> TextConfig(steps=100, warmup_steps=10).rounds
        1
        >>> TextConfig(steps=100, warmup_steps=200)
        Traceback (most recent call last):
        linattn.support.options.OptionError: warmup_steps: must not exceed steps = 100, got 200
    """

    lr: float = option(
        1e-3, "Highest learning rate, at the end of the warm-up.", above=0, group="Training", default_text=BY_RECIPE
    )
    seed: int = option(0, "Seed of first weights, order of data and draws.", least=0, group="Training")
    device: str = option("cpu", "cpu, cuda or cuda:N.", group="Machine", default_text="cuda where there is one")

    def check(self) -> None:
        super().check()
        if self.min_lr > self.lr:
            raise OptionError("min_lr", f"must not exceed lr = {self.lr:g}, got {self.min_lr:g}")
        check_device(self.device)
        check_graphs(self.graphs, self.device)


def part_of(config: Config, kind: type[AnyConfig], **more: Any) -> AnyConfig:
    """A config of ``kind`` with the fields that ``config`` has too, and ``more``."""
    own = {field.name: getattr(config, field.name) for field in fields(kind) if hasattr(config, field.name)}
    return kind(**(own | more))
