"""``linattn train lm``, ``linattn train mlm`` and ``linattn train task``."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch

from linattn.lab.screen import Screen
from linattn.lab.tasks.text import SequenceTask
from linattn.lab.tasks.text.task import once
from linattn.lab.train.accelerator import create_accelerator
from linattn.lab.train.rounds import DivergedError
from linattn.lab.train.text.config import BY_RECIPE, Budget, TextConfig, part_of
from linattn.lab.train.text.hosts import Host, HostShape, count_parameters, create_host, take_weights
from linattn.lab.train.text.loop import train_text
from linattn.lab.train.text.recipes import configure, create_task, host_of_recipe, size_of
from linattn.lab.train.text.run import StepRecord
from linattn.support.checkpoint import ResumeError
from linattn.support.config import option
from linattn.support.extras import need
from linattn.support.options import OptionError, SettingError, check_folder

RIGHT, DIVERGED = 0, 1
SETTINGS = ("data", "length", "tokenizer")  # settings of tasks that are options of commands, where they have them
# Name of a metric -> its format, with the unit.
WORDS = {"accuracy": "{:.2f} % right", "bits_per_byte": "{:.4f} bits per byte", "legal": "{:.2f} % legal",
         "exact_match": "{:.2f} % found", "pearson": "Pearson {:.2f} %"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OnTask(HostShape, Budget):
    """Options of commands that train on a task: what is not given comes from a recipe."""

    task: str = option(help="text, mqar, listops, lra-text, ...; a wrong one lists all.", group="Task")
    data: str | None = option(
        None, "What to read: a text file, also .gz or .jsonl, a folder of .txt files, or what the task asks for.",
        group="Task",
    )  # fmt: skip
    set: dict[str, Any] = option(
        {}, "Setting of the task: key=value; may be given again. A wrong one lists all.", group="Task"
    )
    recipe: str = option(
        "", "A paper's settings for all that is not given, with the depth, width, heads and dropout of its model. A "
        "wrong name lists all.", group="Training", default_text="by task, with a small model",
    )  # fmt: skip
    tokens: int | None = option(None, "Budget in tokens, in place of --steps.", least=1, group="Training")

    @classmethod
    def parse(cls, texts: Mapping[str, Any]) -> Self:
        """A config of the options given, and of the recipe for the others."""
        given = cls.typed(texts)
        name = given.get("task", cls.task if hasattr(cls, "task") else "")
        recipe = given.get("recipe", "")
        own = {key: given[key] for key in SETTINGS if given.get(key) is not None}
        with settings_named(cls):
            task = create_task(name, own | given.get("set", {}), recipe)
        made = cls(**cls.by_recipe(task, given, recipe))
        vars(made)["made"] = task
        return made

    @classmethod
    def by_recipe(cls, task: SequenceTask, given: Mapping[str, Any], recipe: str) -> dict[str, Any]:
        """The fields that are given, with those of the recipe for the others."""
        device = given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = device.startswith("cuda")
        host = {} if "size" in given else host_of_recipe(recipe)
        if given.get("heads"):
            host.pop("head_dim", None)
        found = {"size": size_of(task), **host, "precision": "bf16" if on_gpu else "fp32", "compile": on_gpu,
                 **given, "device": device}  # fmt: skip
        if found.get("clip_norm") == 0:
            found["clip_norm"] = None
        known = {field.name for field in fields(cls)}
        budget = configure(task, {key: found[key] for key in found if key in BUDGET}, recipe)
        budget["tokens"] = None  # they are steps now
        return {key: value for key, value in (found | budget).items() if key in known}

    @once
    def made(self) -> SequenceTask:
        """The task with its settings."""
        own = {key: value for key in SETTINGS if (value := getattr(self, key, None)) is not None}
        with settings_named(type(self)):
            return create_task(self.task, own | self.set, self.recipe)


BUDGET = {field.name for field in fields(TextConfig)} | {"tokens"}


@dataclass(frozen=True, kw_only=True)
class TrainTask(OnTask, Host, TextConfig):
    """Train on a task of sequences, drawn or from files. Started again with the same options, it goes on.

    Exit code: 0 all right, 1 the training diverged, 2 a bad option, 130 interrupted (the same command goes on).
    """

    task: str = option(help="mqar, listops, regbench, mad-recall, ...; a wrong one lists all.", argument=True)
    start: Path | None = option(None, "Folder of a trained model whose weights to start from.", group="Model")
    output: Path | None = option(
        None, "Folder of the run.", affects=False, group="Machine",
        default_text="runs/train/<task>-<mechanism>-seed<seed>",
    )  # fmt: skip

    @property
    def folder(self) -> Path:
        name = self.pattern.replace("*", "x").replace(",", "-").replace("/", "-")
        name += "" if self.canon is None else f"-{self.canon}"
        return self.output or Path("runs/train") / f"{self.task}-{name}-seed{self.seed}"

    def run(self, screen: Screen) -> int:
        """Train or resume, and show the result."""
        need("training a language model", "accelerate", "transformers", "safetensors")
        check_folder("output", self.folder)
        config, task = part_of(self, TextConfig), self.made
        accelerator = create_accelerator(config)
        model = create_host(self, task, config.seed)
        if self.start is not None:
            take_weights(model, self.start)
        main = accelerator.is_main_process
        tested = ""

        def on_record(record: StepRecord) -> None:
            nonlocal tested
            tested = f"  test {in_words(task.metric, record.score)}"

        with (screen if main else Screen(quiet=True)).progress(config.steps) as bar, settings_named(type(self)):

            def on_step(done: int, step: int, loss: float, accuracy: float) -> None:
                step += done * config.round_steps
                words = f"step {step:,}/{config.steps:,}  loss {loss:.3f}  train {accuracy:.1f} %{tested}"
                bar.show(step, words)

            try:
                result = train_text(
                    model, task, config, self.folder, start=None if self.start is None else str(self.start),
                    on_step=on_step, on_record=on_record, on_work=lambda words: bar.show(bar.done, words),
                    accelerator=accelerator,
                )  # fmt: skip
            except ResumeError as error:
                raise OptionError("output", str(error)) from error
            except DivergedError as error:
                screen.warn(str(error))
                return DIVERGED
        if main:
            screen.say(
                f"{self.pattern} on {task.name}: {in_words(result.metric, result.score)} after {config.steps:,} steps, "
                f"{count_parameters(model):,} parameters, {result.seconds:.1f} s of training, "
                f"{result.tokens_per_second:,.0f} tokens/s"
            )
            screen.say(f"checkpoint: {self.folder}\nlog:        {self.folder / 'log.jsonl'}")
            screen.result({"score": result.score, "metric": result.metric, "seconds": result.seconds})
        return RIGHT


@dataclass(frozen=True, kw_only=True)
class TrainLm(TrainTask):
    """Train a language model on a text: next tokens. Started again with the same options, it goes on.

    `linattn generate` then writes with it. Exit code: 0 all right, 1 the training diverged, 2 a bad option,
    130 interrupted (the same command goes on).
    """

    task: str = option("text", hidden=True)
    length: int | None = option(None, "Tokens of a sequence.", group="Task", default_text=BY_RECIPE)
    tokenizer: str | None = option(None, "Folder of a tokenizer of transformers.", group="Task", default_text="bytes")


@dataclass(frozen=True, kw_only=True)
class TrainMlm(TrainLm):
    """Train an encoder on a text: masked tokens. Started again with the same options, it goes on.

    Exit code: 0 all right, 1 the training diverged, 2 a bad option, 130 interrupted (the same command goes on).
    """

    task: str = option("masked-text", hidden=True)


@contextmanager
def settings_named(command: type) -> Iterator[None]:
    """Name the settings of tasks that are not options of ``command`` by ``--set``."""
    own = {field.name for field in fields(command)}
    try:
        yield
    except OptionError as error:
        of_task = isinstance(error, SettingError) and error.option not in SETTINGS
        if error.option in own and not of_task:
            raise
        raise OptionError("set", f"{error.option}: {error.message}") from error


def in_words(metric: str, value: float) -> str:
    """Format a metric with its unit.

    Example:
        >>> in_words("bits_per_byte", 1.5)
        '1.5000 bits per byte'
    """
    return WORDS.get(metric, f"{metric} {{:.4f}}").format(value)
