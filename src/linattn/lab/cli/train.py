"""``linattn train``: images, language models, tasks of sequences."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from linattn.lab.cli.image_options import ImageData, ImageOptions, ImageSize
from linattn.lab.cli.options import DefaultGroup, MechanismOptions, option_errors
from linattn.lab.cli.shared_options import MachineOptions, takes_shared_options


class Train(DefaultGroup):
    """A group that runs ``images`` if no command is named, as in versions with no other command."""

    default = "images"


app = typer.Typer(
    cls=Train,
    help="Train one model: on images (what it does when nothing is named), on text, or on a task of sequences.",
    no_args_is_help=False,
)


@app.command()
@takes_shared_options()
def images(
    *,
    data: ImageData = "digits",
    mechanism: Annotated[str, typer.Option(help="A name from `linattn mechanisms`.")] = "softmax",
    recipe: Annotated[
        str,
        typer.Option(help="digits, small_images or deit: what is not given below.", show_default="by data"),
    ] = "",
    size: Annotated[
        str, typer.Option(help="Host: digits, pico, nano, tiny, small or base.", show_default="by data")
    ] = "",
    patch_size: Annotated[int | None, typer.Option(help="Pixels of a token's side.")] = None,
    global_pool: Annotated[str, typer.Option(help="avg, or token for a class token.")] = "avg",
    preset: Annotated[str, typer.Option(help="A paper's block around the mechanism.")] = "",
    option: MechanismOptions = [],  # noqa: B006, typer copies it
    drop_path: Annotated[float, typer.Option(help="Rate at which an image skips a branch in training.")] = 0.0,
    image_size: ImageSize = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training images.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images of a step, over all processes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    min_lr: Annotated[float | None, typer.Option(help="Learning rate of the last step.")] = None,
    training: ImageOptions,
    machine: MachineOptions,
    seed: Annotated[int, typer.Option(help="Seed of first weights, order and augmentation.")] = 0,
    checkpoint_seconds: Annotated[float | None, typer.Option(help="Longest time between two checkpoints.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run.", show_default="runs/train/<data>-<mechanism>-seed<seed>")
    ] = None,
) -> None:
    """Train one mechanism in a vision transformer. Started again with the same options, it goes on where it stopped.

    Exit code: 0 all right, 1 the training diverged, 2 a bad option, 130 interrupted (the same command goes on).
    """

    from linattn.lab.train.mechanism_options import parse_options
    from linattn.lab.train.screen import TrainJob, train_on_screen
    from linattn.mechanisms.registry import list_mechanisms
    from linattn.support.options import check_option

    budget = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "min_lr": min_lr}
    changes = budget | training.changes() | machine.changes()
    changes |= {"seed": seed, "checkpoint_seconds": checkpoint_seconds}
    host: dict[str, Any] = {"global_pool": global_pool, "drop_path_rate": drop_path}
    host |= {"patch_size": patch_size} if patch_size is not None else {}
    host |= {"preset": preset} if preset else {}
    folder = output or Path("runs/train") / f"{Path(data).stem}-{mechanism}-seed{seed}"
    with option_errors():
        check_option("mechanism", mechanism, list_mechanisms(bidirectional=True))
        check_option("global_pool", global_pool, ("avg", "token"))
        own = parse_options(option)
        job = TrainJob(data, mechanism, folder, image_size, recipe, changes, size, host, own)
        code = train_on_screen(job, Console())
    raise typer.Exit(code)
