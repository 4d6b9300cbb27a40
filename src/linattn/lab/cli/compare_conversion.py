"""``linattn compare conversion``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from linattn.lab.cli.image_options import ImageData, ImageOptions, ImageRecipe, ImageSize, recipe_or_default
from linattn.lab.cli.options import Jobs, MechanismOptions, names, numbers, option_errors
from linattn.lab.cli.shared_options import MachineOptions, takes_shared_options


@takes_shared_options("clip_norm", "label_smoothing", "ema_decay", "erasing")
def conversion(
    *,
    data: ImageData = "digits",
    mechanisms: Annotated[
        str, typer.Option(help="Mechanisms, with commas; softmax is the same model, trained on as long as the others.")
    ] = "softmax,relu,nala,mirror",
    seeds: Annotated[int, typer.Option(help="Softmax models, each converted to every mechanism.")] = 3,
    epochs: Annotated[int | None, typer.Option(help="Epochs of the softmax model.")] = None,
    share: Annotated[float, typer.Option(help="Epochs after the conversion over those before it.")] = 0.1,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate of the softmax model.")] = None,
    finetune_lr: Annotated[
        str,
        typer.Option(
            help="After the conversion; of several, each mechanism takes its best on held-out training images.",
            show_default="as before",
        ),
    ] = "",
    batch_size: Annotated[int | None, typer.Option(help="Images in a training step.")] = None,
    training: ImageOptions,
    recipe: ImageRecipe = "",
    size: Annotated[str, typer.Option(help="Size of timm's DeiT: tiny, small or base.")] = "tiny",
    patch_size: Annotated[
        int | None, typer.Option(help="Pixels of a token's side.", show_default="4; of digits 2")
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Blocks of the model.", show_default="12")] = None,
    option: MechanismOptions = [],  # noqa: B006, typer copies it
    machine: MachineOptions,
    image_size: ImageSize = None,
    jobs: Jobs = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the comparison.", show_default="runs/conversion-<data>")
    ] = None,
) -> None:
    """Train a softmax DeiT, convert it to other mechanisms, train each on; accuracy before, right after, at the end.

    Table, CSV, charts and report.html. Started again, it goes on.

    Exit code: 0 all right, 1 a run failed, 2 a bad option, 130 interrupted (finished runs are kept).
    """
    from linattn.lab.compare.compare import compare
    from linattn.lab.compare.conversion.settings import ConversionConfig, with_start_options
    from linattn.lab.compare.workers import default_jobs
    from linattn.lab.train.mechanism_options import parse_options
    from linattn.lab.train.recipes import configure

    budget = {"epochs": epochs, "batch_size": batch_size, "lr": lr}
    with option_errors():
        train = configure(recipe_or_default(recipe, data), budget | training.changes() | machine.changes())
        config = ConversionConfig(
            data,
            names(mechanisms),
            size,
            patch_size or (2 if data == "digits" else 4),
            depth,
            train,
            share,
            seeds,
            numbers("finetune-lr", finetune_lr),
            with_start_options(names(mechanisms), parse_options(option)),
            image_size=image_size,
            output=output or Path("runs") / f"conversion-{Path(data).stem}",
            jobs=default_jobs(train.device) if jobs is None else jobs,
        )
        code = compare(config, Console())
    raise typer.Exit(code)
