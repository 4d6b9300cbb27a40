"""``linattn inspect``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from linattn.lab.cli.options import (
    Device,
    Threads,
    device_or_default,
    names,
    option_errors,
    precision_or_default,
    set_threads,
)


def inspect(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Folder of a pretrained model of transformers.")],
    text: Annotated[
        list[str], typer.Option(help="Text to read: a file, a folder of .txt files, .jsonl; may be given again.")
    ],
    length: Annotated[int, typer.Option(help="Tokens of a sequence; 0: the model's, to 512.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Sequences read at a time.")] = 2,
    held_out: Annotated[int, typer.Option(help="Sequences that figures are measured on.")] = 4,
    window: Annotated[int, typer.Option(help="Tokens that count as near.")] = 64,
    steps: Annotated[
        int, typer.Option(help="Steps that each candidate is trained for; 0: compared as it starts.")
    ] = 20,
    lr: Annotated[float, typer.Option(help="Highest learning rate of these.")] = 1e-2,
    candidates: Annotated[
        str,
        typer.Option(
            help="Candidates to take softmax's place, with commas; a wrong one lists all.", show_default="all that suit"
        ),
    ] = "",
    tolerance: Annotated[
        float, typer.Option(help="Tolerance of the degrees of freedom; a smaller one counts more of them.")
    ] = 2**-8,
    points: Annotated[int, typer.Option(help="Queries and keys that these are measured on.")] = 512,
    cost: Annotated[int | None, typer.Option(help="Mean dimension to split.", show_default="the head's")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the report.", show_default="runs/inspect/<model>")
    ] = None,
    page: Annotated[bool, typer.Option(help="Write inspect.html (extra report).")] = True,
    device: Device = "",
    precision: Annotated[
        str, typer.Option(help="Type of the weights: fp32 or bf16.", show_default="bf16 on cuda")
    ] = "",
    threads: Threads = 0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
) -> None:
    """Look at a pretrained model's attention: how sharp it is, how far it looks, what could take its place.

    The model is not changed and nothing of it is kept; `linattn linearize` converts it.

    Exit code: 0 all right, 2 a bad option, 130 interrupted.
    """
    from linattn.convert.inspect import InspectOptions
    from linattn.lab.convert.jobs.inspect_run import InspectJob, inspect_folder

    set_threads(threads)
    device = device_or_default(device)
    options = InspectOptions(window, steps, lr, names(candidates) or None, tolerance, points, cost, seed)
    with option_errors(", or use --no-page", arguments={"model": "MODEL_DIR"}):
        folder = output or Path("runs/inspect") / model.resolve().name
        precision = precision_or_default(precision, device)
        job = InspectJob(model, folder, tuple(text), options, length, batch_size, held_out, device, precision, page)
        code = inspect_folder(job, Console())
    raise typer.Exit(code)
