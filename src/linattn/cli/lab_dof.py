"""``linattn lab dof``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from linattn.cli.lab_options import Chart, Name, Output, lab_folder
from linattn.cli.options import Threads, integers, option_errors, set_threads


def dof(
    counts: Annotated[str, typer.Option(help="Numbers of features, with commas.  [default: 16 to 1024]")] = "",
    seeds: Annotated[int, typer.Option(help="Draws of the features for each number.")] = 5,
    points: Annotated[int, typer.Option(help="Queries and keys that the kernel is looked at on.")] = 384,
    tolerance: Annotated[float, typer.Option(help="In units of the kernel's largest eigenvalue.")] = 2**-4,
    heads: Annotated[int, typer.Option(help="Heads looked at of each source.")] = 4,
    dim: Annotated[int, typer.Option(help="Width of random activations.")] = 32,
    norm: Annotated[float, typer.Option(help="Of random activations: the mean of |x|^2 / sqrt(dim).")] = 1.5,
    activations: Annotated[
        Path | None,
        typer.Option(help="Real ones: a file with q and k (.npz, .pt, .safetensors), or a folder of a language model."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="File that the model reads.  [default: what it writes itself]")
    ] = None,
    delta: Annotated[float, typer.Option(help="The bound holds with probability 1 - 2 delta.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Of activations and features.")] = 0,
    threads: Threads = 0,
    chart: Chart = True,
    output: Output = None,
    name: Name = "lab-dof",
    quick: Annotated[bool, typer.Option("--quick", help="Small: shows in seconds that everything runs.")] = False,
    large: Annotated[bool, typer.Option("--large", help="More heads, points, seeds and features.")] = False,
) -> None:
    """How well random features approximate softmax attention, drawn from N(0, I) and by leverage scores.

    The error of the kernel and of attention-weighted sums against the number of features, with the bound that the
    degrees of freedom of the activations give. Runs on the CPU, in fp64.

    Exit code: 0 all right, 1 the bound failed more often than it may, 2 a bad option or a package that is missing.
    """
    from linattn.lab.dof.run import dof_on_screen
    from linattn.lab.dof.settings import COUNTS, LARGE, QUICK, DofConfig

    set_threads(threads)
    if quick and large:
        raise typer.BadParameter("cannot be given together with --quick", param_hint="--large")
    config = DofConfig(
        counts=integers("counts", counts) or COUNTS,
        seeds=seeds,
        points=points,
        tolerance=tolerance,
        heads=heads,
        dim=dim,
        norm=norm,
        activations=activations,
        text=text,
        delta=delta,
        seed=seed,
    )
    if quick or large:
        config = replace(config, **(QUICK if quick else LARGE))
    with option_errors(", or use --no-chart"):
        config.check()
        folder = lab_folder(output, "cpu", quick=quick)
        code = dof_on_screen(config, folder, name, chart, Console())
    raise typer.Exit(code)
