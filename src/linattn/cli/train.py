"""``linattn train``: images, language models, tasks of sequences."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from linattn.cli.image_options import (
    Compile,
    CropPadding,
    EmaDecay,
    Flip,
    Graphs,
    ImageData,
    ImageSize,
    Mixing,
    Precision,
    RandAugment,
    WarmupEpochs,
    WeightDecay,
)
from linattn.cli.options import DefaultGroup, Device, device_or_default, option_errors
from linattn.cli.train_text import lm, mlm, task


class Train(DefaultGroup):
    """Images where nothing is named, as when it knew nothing else."""

    default = "images"


app = typer.Typer(
    cls=Train,
    help="Train one model: on images (what it does when nothing is named), on text, or on a task of sequences.",
    no_args_is_help=False,
)
for command in (lm, mlm, task):
    app.command()(command)


@app.command()
def images(
    data: ImageData = "digits",
    mechanism: Annotated[str, typer.Option(help="A name from `linattn mechanisms`.")] = "softmax",
    recipe: Annotated[
        str,
        typer.Option(help="digits, small_images or deit: what is not given below.  [default: by data]"),
    ] = "",
    size: Annotated[str, typer.Option(help="Host: digits, pico, nano, tiny, small or base.  [default: by data]")] = "",
    patch_size: Annotated[int | None, typer.Option(help="Pixels of a token's side.")] = None,
    global_pool: Annotated[str, typer.Option(help="avg, or token for a class token.")] = "avg",
    preset: Annotated[str, typer.Option(help="A paper's block around the mechanism.")] = "",
    drop_path: Annotated[float, typer.Option(help="Rate at which an image skips a branch in training.")] = 0.0,
    image_size: ImageSize = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training images.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images of a step, over all processes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None,
    min_lr: Annotated[float | None, typer.Option(help="Learning rate of the last step.")] = None,
    warmup_epochs: WarmupEpochs = None,
    weight_decay: WeightDecay = None,
    clip_norm: Annotated[float | None, typer.Option(help="Longest gradient; 0: not clipped.")] = None,
    label_smoothing: Annotated[float | None, typer.Option(help="Share of a target spread over all classes.")] = None,
    ema_decay: EmaDecay = None,
    mixup: Mixing = None,
    cutmix: Mixing = None,
    rand_augment: RandAugment = None,
    erasing: Annotated[float | None, typer.Option(help="Probability to erase a part of an image.")] = None,
    crop_padding: CropPadding = None,
    flip: Flip = None,
    device: Device = "",
    precision: Precision = "",
    compile: Compile = None,
    graphs: Graphs = None,
    seed: Annotated[int, typer.Option(help="Of first weights, order and augmentation.")] = 0,
    checkpoint_seconds: Annotated[float | None, typer.Option(help="Longest time between two checkpoints.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder.  [default: runs/train/<data>-<mechanism>-seed<seed>]")
    ] = None,
) -> None:
    """Train one mechanism in a vision transformer. Started again with the same options, it goes on where it stopped.

    Exit code: 0 all right, 1 the training diverged, 2 a bad option, 130 interrupted (the same command goes on).
    """

    from linattn.mechanisms.registry import list_mechanisms
    from linattn.support.options import check_option
    from linattn.train.screen import TrainJob, train_on_screen

    device = device_or_default(device)
    on_gpu = device.startswith("cuda")
    changes: dict[str, Any] = {
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "min_lr": min_lr,
        "warmup_epochs": warmup_epochs,
        "weight_decay": weight_decay,
        "clip_norm": clip_norm,
        "label_smoothing": label_smoothing,
        "ema_decay": ema_decay,
        "mixup": mixup,
        "cutmix": cutmix,
        "rand_augment": rand_augment,
        "erasing": erasing,
        "crop_padding": crop_padding,
        "flip": flip,
        "device": device,
        "precision": precision or ("bf16" if on_gpu else "fp32"),
        "compile": on_gpu if compile is None else compile,
        "graphs": graphs,
        "seed": seed,
        "checkpoint_seconds": checkpoint_seconds,
    }
    host: dict[str, Any] = {"global_pool": global_pool, "drop_path_rate": drop_path}
    host |= {"patch_size": patch_size} if patch_size is not None else {}
    host |= {"preset": preset} if preset else {}
    folder = output or Path("runs/train") / f"{Path(data).stem}-{mechanism}-seed{seed}"
    with option_errors():
        check_option("mechanism", mechanism, list_mechanisms(bidirectional=True))
        check_option("global_pool", global_pool, ("avg", "token"))
        code = train_on_screen(TrainJob(data, mechanism, folder, image_size, recipe, changes, size, host), Console())
    raise typer.Exit(code)
