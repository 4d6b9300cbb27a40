"""A training run with its output for users: a progress bar, the result, and an exit code."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from linattn.lab.tasks.images import ImageData, ImageFolders
from linattn.lab.tasks.load import load_images
from linattn.lab.train.accelerator import create_accelerator
from linattn.lab.train.attempt import attempt
from linattn.lab.train.batches import create_batches
from linattn.lab.train.energy import check_energy
from linattn.lab.train.loop import train
from linattn.lab.train.mechanism_options import layer_options, option_or
from linattn.lab.train.progress import train_bar
from linattn.lab.train.recipes import configure, default_recipe
from linattn.lab.train.records import TrainResult
from linattn.models.vision import SIZES, VisionTransformer, create_vit
from linattn.support.options import OptionError, check_folder, check_option, options_words


@dataclass(frozen=True)
class TrainJob:
    """One mechanism in one host on one data set. The data decides options that are empty texts."""

    data: str
    mechanism: str
    folder: Path
    image_size: int | None = None
    recipe: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``TrainConfig`` that differ from the recipe; None: as in the recipe."""
    size: str = ""
    host: Mapping[str, Any] = field(default_factory=dict)
    """Options of the vision transformer."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of the mechanism, under its name or the empty name."""

    @property
    def own_options(self) -> dict[str, Any]:
        return layer_options([self.mechanism], self.options)[0]


def train_on_screen(job: TrainJob, console: Console) -> int:
    """Train or resume, and show the result. Returns the exit code: 1 if training diverged, 130 after Ctrl-C."""
    data = load_images(job.data, image_size=job.image_size)
    config = configure(job.recipe or default_recipe(data), job.changes)
    config.check()
    check_folder("output", job.folder)
    accelerator = create_accelerator(config)
    model = _create_host(job, data, config.seed)
    check_energy(config.energy_loss, model.modules())
    rank, processes = accelerator.process_index, accelerator.num_processes
    batches = create_batches(data, config, accelerator.device, rank=rank, processes=processes)

    def run() -> TrainResult:
        with train_bar(config.epochs, batches.steps_per_epoch, hidden=rank > 0) as bar:
            return train(
                model,
                batches,
                config,
                job.folder,
                options=job.own_options,
                on_step=bar.on_step,
                on_epoch=bar.on_epoch,
                accelerator=accelerator,
            )

    result, code = attempt(run, console, "finished epochs are kept")
    if rank == 0 and result is not None:
        _show(job, model, result, console)
    return code


def _create_host(job: TrainJob, data: ImageData | ImageFolders, seed: int) -> VisionTransformer:
    size = job.size or ("tiny" if isinstance(data, ImageFolders) else "digits" if data.name == "digits" else "nano")
    check_option("size", size, SIZES)
    shape = {"img_size": data.image_size, "in_chans": data.channels, "num_classes": data.num_classes}
    options: dict[str, Any] = shape | dict(job.host)
    own = job.own_options
    options |= {"attention": {"mechanism_options": own}} if own else {}
    torch.manual_seed(seed)
    try:
        return create_vit(size, job.mechanism, **options)
    except (ValueError, TypeError) as error:  # "patch_size must be ...": an argument of the model, and an option here
        option, _, message = str(error).partition(" ")
        if option in options:
            raise OptionError(option, message) from error
        raise option_or("mechanism", error, job.mechanism, own) from error


def _show(job: TrainJob, model: VisionTransformer, result: TrainResult, console: Console) -> None:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = f"{job.mechanism} {options_words(job.own_options)}".strip()
    console.print(
        f"{name}: [bold]{result.top1:.2f} %[/] of the test images after {len(result.epochs)} epochs, "
        f"{parameters:,} parameters, {result.seconds:.1f} s of training",
        soft_wrap=True,
    )
    console.print(f"weights: {job.folder / 'weights.pt'}", soft_wrap=True)
    console.print(f"log:     {job.folder / 'log.jsonl'}", soft_wrap=True)
