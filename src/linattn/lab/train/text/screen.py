"""A training run on text with its output for users: a progress bar, the result, and an exit code."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from linattn.lab.tasks.text import SequenceTask
from linattn.lab.train.accelerator import create_accelerator
from linattn.lab.train.attempt import attempt
from linattn.lab.train.text.config import TextConfig
from linattn.lab.train.text.hosts import HostOptions, count_parameters, create_host
from linattn.lab.train.text.loop import train_text
from linattn.lab.train.text.recipes import configure
from linattn.lab.train.text.records import StepRecord, TextResult
from linattn.support.extras import need
from linattn.support.options import check_folder
from linattn.support.progress import step_bar

# Name of a metric -> its format, with the unit.
WORDS = {"accuracy": "{:.2f} % right", "bits_per_byte": "{:.4f} bits per byte", "legal": "{:.2f} % legal",
         "exact_match": "{:.2f} % found", "pearson": "Pearson {:.2f} %"}  # fmt: skip


@dataclass(frozen=True)
class TextJob:
    """One host on one task."""

    task: SequenceTask
    host: HostOptions
    folder: Path
    recipe: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``TextConfig`` that differ from the recipe; None: as in the recipe."""
    tokens: int | None = None
    start: Path | None = None
    """A checkpoint whose weights the model starts from."""


class TextBar:
    """A progress bar; its methods are the callbacks of ``train_text``."""

    def __init__(self, progress: Progress, task: TaskID, config: TextConfig, metric: str) -> None:
        self._progress, self._task, self._config, self._metric = progress, task, config, metric
        self._tested = ""

    def on_step(self, epoch: int, step: int, loss: float, accuracy: float) -> None:
        done = epoch * self._config.round_steps + step
        text = f"step {done:,}/{self._config.steps:,}  loss {loss:.3f}  train {accuracy:.1f} %{self._tested}"
        self._progress.update(self._task, completed=done, description=text)

    def on_work(self, words: str) -> None:
        self._progress.update(self._task, description=words)

    def on_record(self, record: StepRecord) -> None:
        self._tested = f"  test {in_words(self._metric, record.score)}"


@contextmanager
def text_bar(config: TextConfig, metric: str, *, hidden: bool = False) -> Iterator[TextBar]:
    with step_bar(config.steps, None, hidden=hidden) as (progress, task):
        yield TextBar(progress, task, config, metric)


def train_text_on_screen(job: TextJob, console: Console) -> int:
    """Train or resume, and show the result. Returns the exit code: 1 if training diverged, 130 after Ctrl-C."""
    need("training a language model", "accelerate", "transformers", "safetensors")
    config = configure(job.task, job.changes, job.recipe, job.tokens)
    config.check()
    check_folder("output", job.folder)
    accelerator = create_accelerator(config)
    model = create_host(job.host, job.task, config.seed)
    if job.start is not None:
        from linattn.lab.train.text.start import take_weights

        take_weights(model, job.start)

    def run() -> TextResult:
        with text_bar(config, job.task.metric, hidden=not accelerator.is_main_process) as bar:
            return train_text(
                model,
                job.task,
                config,
                job.folder,
                start=None if job.start is None else str(job.start),
                on_step=bar.on_step,
                on_record=bar.on_record,
                on_work=bar.on_work,
                accelerator=accelerator,
            )

    result, code = attempt(run, console, "the last checkpoint is kept")
    if accelerator.is_main_process and result is not None:
        console.print(
            f"{job.host.mechanism} on {job.task.name}: [bold]{in_words(result.metric, result.score)}[/] after "
            f"{config.steps:,} steps, {count_parameters(model):,} parameters, {result.seconds:.1f} s of training, "
            f"{result.tokens_per_second:,.0f} tokens/s",
            soft_wrap=True,
        )
        console.print(f"checkpoint: {job.folder}", soft_wrap=True)
        console.print(f"log:        {job.folder / 'log.jsonl'}", soft_wrap=True)
    return code


def in_words(metric: str, value: float) -> str:
    """Format a metric with its unit.

    Example:
        >>> in_words("bits_per_byte", 1.5)
        '1.5000 bits per byte'
    """
    return WORDS.get(metric, f"{metric} {{:.4f}}").format(value)
