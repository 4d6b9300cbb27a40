"""``linattn train images``, ``linattn train lm``, ``linattn train mlm`` and ``linattn train task``."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from linattn.lab.cases import Where
from linattn.lab.experiment import FAILED, RIGHT
from linattn.lab.screen import Bar, Screen
from linattn.lab.tasks.load import load_images
from linattn.lab.train.accelerator import create_accelerator
from linattn.lab.train.batches import create_batches
from linattn.lab.train.config import TrainConfig, check_owners, option_or, options_of
from linattn.lab.train.host import VisionHost
from linattn.lab.train.loop import check_energy, train
from linattn.lab.train.rounds import DivergedError, OnStep
from linattn.lab.train.text.config import BY_RECIPE, OnTask, TextConfig, part_of, settings_named
from linattn.lab.train.text.hosts import Host, count_parameters, create_host, take_weights
from linattn.lab.train.text.loop import train_text
from linattn.mechanisms.registry import list_mechanisms
from linattn.support.checkpoint import ResumeError
from linattn.support.config import Config, option
from linattn.support.extras import need
from linattn.support.options import OptionError, check_folder, options_words

# Name of a metric -> its format, with the unit.
WORDS = {"accuracy": "{:.2f} % right", "bits_per_byte": "{:.4f} bits per byte", "legal": "{:.2f} % legal",
         "exact_match": "{:.2f} % found", "pearson": "Pearson {:.2f} %"}  # fmt: skip


class Training(Config):
    """The base of commands that train: ``train`` returns words and numbers about the result."""

    folder: Any

    def run(self, screen: Screen) -> int:
        """Train or resume, and show the result."""
        need("training", "accelerate")
        check_folder("output", self.folder)
        accelerator = create_accelerator(self)
        screen = screen if accelerator.is_main_process else Screen(quiet=True)
        try:
            with settings_named(type(self)):
                words, numbers = self.train(screen, accelerator)
        except ResumeError as error:
            raise OptionError("output", str(error)) from error
        except DivergedError as error:
            screen.warn(str(error))
            return FAILED
        screen.say(f"{words}\nweights and log: {self.folder}")
        screen.result(numbers)
        return RIGHT

    def train(self, screen: Screen, accelerator: Any) -> tuple[str, dict[str, Any]]:
        raise NotImplementedError


def shown(bar: Bar, round_steps: int) -> OnStep:
    """Show steps on a bar."""

    def on_step(done: int, step: int, loss: float, accuracy: float) -> None:
        step += done * round_steps
        bar.show(step, f"step {step:,}/{bar.total:,}  loss {loss:.3f}  train {accuracy:.1f} %")

    return on_step


@dataclass(frozen=True, kw_only=True)
class TrainImages(Training, VisionHost, TrainConfig):
    """Train one mechanism on images. Started again with the same options, it goes on where it stopped.

    Exit code: 0 all right, 1 the training diverged, 2 a bad option, 130 interrupted (the same command goes on).
    """

    mechanism: str = option(
        "softmax", "A name from `linattn mechanisms`.", choices=lambda: list_mechanisms(bidirectional=True)
    )
    output: Path | None = option(
        None, "Folder of the run.", affects=False, default_text="runs/train/<data>-<mechanism>-seed<seed>"
    )
    jobs: int = option(1, hidden=True, affects=False)
    where: Where = option("here", hidden=True, affects=False)
    option: dict[str, Any] = option({}, "Option of the mechanism: key=value; may be given again.")

    def check(self) -> None:
        super().check()
        check_owners(self.option, (self.mechanism,))

    @property
    def folder(self) -> Path:
        return self.output or Path("runs/train") / f"{Path(self.data).stem}-{self.mechanism}-seed{self.seed}"

    def train(self, screen: Screen, accelerator: Any) -> tuple[str, dict[str, Any]]:
        data, options = load_images(self.data, image_size=self.image_size), options_of(self.mechanism, self.option)
        try:
            model = self.create(self.mechanism, data, self.seed, options)
        except (ValueError, TypeError) as error:
            name, _, message = str(error).partition(" ")
            if name in {field.name for field in fields(VisionHost)}:  # "patch_size must be ..."
                raise OptionError(name, message) from error
            raise option_or("mechanism", error, self.mechanism, options) from error
        check_energy(self.energy_loss, model.modules())
        rank, processes = accelerator.process_index, accelerator.num_processes
        batches = create_batches(data, self, accelerator.device, rank=rank, processes=processes)
        steps = batches.steps_per_epoch
        with screen.progress(self.epochs * steps) as bar:
            on_step = shown(bar, steps)
            found = train(model, batches, self, self.folder, options=options, on_step=on_step, accelerator=accelerator)
        count = count_parameters(model)
        words = f"{self.mechanism} {options_words(options)}".strip() + (
            f": {found.top1:.2f} % of the test images after {len(found.epochs)} epochs, {count:,} parameters, "
            f"{found.seconds:.1f} s of training"
        )
        return words, {"top1": found.top1, "seconds": found.seconds, "parameters": count, "folder": str(self.folder)}


@dataclass(frozen=True, kw_only=True)
class TrainTask(Training, OnTask, Host, TextConfig):
    """Train on a task of sequences, drawn or from files. Started again with the same options, it goes on.

    Exit code: 0 all right, 1 the training diverged, 2 a bad option, 130 interrupted (the same command goes on).
    """

    task: str = option(help="mqar, listops, regbench, mad-recall, ...; a wrong one lists all.", argument=True)
    start: Path | None = option(None, "Folder of a trained model whose weights to start from.", group="Model")
    output: Path | None = option(
        None, "Folder of the run.", affects=False, group="Machine",
        default_text="runs/train/<task>-<mechanism>-seed<seed>"
    )  # fmt: skip

    @property
    def folder(self) -> Path:
        name = self.pattern.replace("*", "x").replace(",", "-").replace("/", "-")
        name += "" if self.canon is None else f"-{self.canon}"
        return self.output or Path("runs/train") / f"{self.task}-{name}-seed{self.seed}"

    def train(self, screen: Screen, accelerator: Any) -> tuple[str, dict[str, Any]]:
        need("training a language model", "transformers", "safetensors")
        config, task, start = part_of(self, TextConfig), self.made, self.start
        model = create_host(self, task, config.seed)
        if start is not None:
            take_weights(model, start)
        with screen.progress(config.steps) as bar:
            found = train_text(
                model, task, config, self.folder, start=None if start is None else str(start),
                on_step=shown(bar, config.round_steps), on_work=lambda words: bar.show(bar.done, words),
                accelerator=accelerator,
            )  # fmt: skip
        words = (
            f"{self.pattern} on {task.name}: {in_words(found.metric, found.score)} after {config.steps:,} steps, "
            f"{count_parameters(model):,} parameters, {found.seconds:.1f} s of training, "
            f"{found.records[-1].tokens / max(found.seconds, 1e-9):,.0f} tokens/s"
        )
        return words, {"score": found.score, "metric": found.metric, "seconds": found.seconds}


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


def in_words(metric: str, value: float) -> str:
    """Format a metric with its unit.

    Example:
        >>> in_words("bits_per_byte", 1.5)
        '1.5000 bits per byte'
    """
    return WORDS.get(metric, f"{metric} {{:.4f}}").format(value)
