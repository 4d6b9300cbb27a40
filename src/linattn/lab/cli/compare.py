"""``linattn compare``: images, conversions, tasks of sequences."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from linattn.lab.cli.compare_conversion import conversion
from linattn.lab.cli.compare_text import text
from linattn.lab.cli.image_options import ImageData, ImageOptions, ImageRecipe, ImageSize, recipe_or_default
from linattn.lab.cli.options import DefaultGroup, Jobs, MechanismOptions, names, numbers, option_errors
from linattn.lab.cli.shared_options import MachineOptions, takes_shared_options


class Compare(DefaultGroup):
    """A group that runs ``text`` if ``--task`` is given and no command is named, and else ``images``."""

    default = "images"
    by_task = "--task TASK"  # what usage lines have in place of a command's name

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        task = any(arg.split("=")[0] == "--task" for arg in args)
        if task and args[0].startswith("-"):
            ctx.meta[self.by_task] = True
            args = ["text", *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return self.by_task if self.by_task in ctx.meta else name, command, rest


app = typer.Typer(
    cls=Compare,
    help="Train mechanisms in one host with one budget: on images, or with --task on text and tasks of sequences.",
    no_args_is_help=False,
)
app.command()(text)
app.command()(conversion)


@app.command()
@takes_shared_options("clip_norm", "label_smoothing", "erasing")
def images(
    *,
    data: ImageData = "digits",
    mechanisms: Annotated[
        str, typer.Option(help="Names from `linattn mechanisms`, with commas.")
    ] = "softmax,relu,pola,nala,mirror",
    seeds: Annotated[int, typer.Option(help="Runs of each mechanism.")] = 2,
    lr: Annotated[
        str, typer.Option(help="Learning rate; of several, each mechanism takes its best on held-out training images.")
    ] = "",
    epochs: Annotated[int | None, typer.Option(help="Epochs of each run.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images in a training step.")] = None,
    training: ImageOptions,
    recipe: ImageRecipe = "",
    host: Annotated[
        str, typer.Option(help="vit, or pyramid: the four stages of NaLaFormer and its relatives.")
    ] = "vit",
    size: Annotated[
        str,
        typer.Option(
            help="Size of the host: digits, pico, nano, tiny, small or base; of a pyramid xt, t, s, b or l.",
            show_default="by data; xt",
        ),
    ] = "",
    stages: Annotated[
        str, typer.Option(help="Stages of a pyramid, a letter each: l, the mechanism; s, softmax.", show_default="llss")
    ] = "",
    patch_size: Annotated[
        int | None,
        typer.Option(
            help="Pixels of a token's side; in the first stage of a pyramid 4, 2 or 1.",
            show_default="by size; of a pyramid 4, less where the last stage would be one token",
        ),
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Blocks of the host.")] = None,
    global_pool: Annotated[str, typer.Option(help="avg, or token for a class token.")] = "avg",
    preset: Annotated[
        str, typer.Option(help="A paper's block around every mechanism alike.", show_default="none; of a pyramid nala")
    ] = "",
    local: Annotated[str, typer.Option(help="shared or channel: a convolution of the values beside each.")] = "",
    option: MechanismOptions = [],  # noqa: B006, typer copies it
    machine: MachineOptions,
    image_size: ImageSize = None,
    jobs: Jobs = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the comparison.", show_default="runs/compare-<data>")
    ] = None,
) -> None:
    """Train mechanisms in one host with one budget; table, CSV, charts and report.html. Started again, it goes on.

    Exit code: 0 all right, 1 a run failed, 2 a bad option, 130 interrupted (finished runs are kept).
    """

    from linattn.lab.compare.compare import compare as run
    from linattn.lab.compare.settings import PYRAMID, CompareConfig, HostConfig
    from linattn.lab.compare.workers import default_jobs
    from linattn.lab.train.mechanism_options import parse_options
    from linattn.lab.train.recipes import configure
    from linattn.support.options import OptionError

    lrs = numbers("lr", lr)
    budget = {"epochs": epochs, "batch_size": batch_size, "lr": lrs[0] if len(lrs) == 1 else None}
    with option_errors():
        train = configure(recipe_or_default(recipe, data), budget | training.changes() | machine.changes())
        if stages and host != PYRAMID:
            raise OptionError("stages", f"are those of a pyramid, but the host is {host}")
        host_config = HostConfig(
            size or ("xt" if host == PYRAMID else "digits" if data == "digits" else "nano"),
            patch_size, depth, global_pool, preset or None, local or None, host, stages or "llss",
            parse_options(option),
        )  # fmt: skip
        folder = output or Path("runs") / f"compare-{Path(data).stem}"
        config = CompareConfig(
            data,
            names(mechanisms),
            host_config,
            train,
            seeds,
            lrs if len(lrs) > 1 else (),
            image_size,
            folder,
            default_jobs(train.device) if jobs is None else jobs,
        )
        code = run(config, Console())
    raise typer.Exit(code)
