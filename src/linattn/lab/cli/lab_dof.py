"""``linattn lab dof``."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from linattn.lab.cli.lab_options import Chart, Name, Output, lab_folder
from linattn.lab.cli.options import Threads, integers, option_errors, set_threads


def dof(
    counts: Annotated[
        str,
        typer.Option(help="Numbers of features, with commas.", show_default="16 to 1024, with --quick 16,64"),
    ] = "",
    seeds: Annotated[
        int | None,
        typer.Option(help="Draws of the features for each number.", show_default="5, with --quick 2, with --large 10"),
    ] = None,
    points: Annotated[
        int | None,
        typer.Option(
            help="Queries and keys that the kernel is looked at on.",
            show_default="384, with --quick 48, with --large 1024",
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Tolerance of the degrees of freedom, in units of the kernel's largest eigenvalue.")
    ] = 2**-4,
    heads: Annotated[
        int | None,
        typer.Option(help="Heads looked at of each source.", show_default="4, with --quick 1, with --large 12"),
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(help="Width of random activations.", show_default="32, with --quick 8"),
    ] = None,
    norm: Annotated[float, typer.Option(help="Size of random activations: the mean of |x|^2 / sqrt(dim).")] = 1.5,
    activations: Annotated[
        Path | None,
        typer.Option(help="Real ones: a file with q and k (.npz, .pt, .safetensors), or a folder of a language model."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="File that the model reads.", show_default="what it writes itself")
    ] = None,
    delta: Annotated[float, typer.Option(help="The bound holds with probability 1 - 2 delta.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of activations and features.")] = 0,
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
    from linattn.lab.theory.dof.run import dof_on_screen
    from linattn.lab.theory.dof.settings import LARGE, QUICK, DofConfig

    set_threads(threads)
    if quick and large:
        raise typer.BadParameter("cannot be given together with --quick", param_hint="--large")
    sizes = {
        "counts": integers("counts", counts) or None,
        "seeds": seeds,
        "points": points,
        "heads": heads,
        "dim": dim,
    }
    given: dict[str, Any] = {key: value for key, value in sizes.items() if value is not None}
    others = {"tolerance": tolerance, "norm": norm, "activations": activations, "text": text, "delta": delta}
    config = DofConfig(**(QUICK if quick else LARGE if large else {}) | given | others, seed=seed)
    with option_errors(", or use --no-chart"):
        config.check()
        folder = lab_folder(output, "cpu", quick=quick)
        code = dof_on_screen(config, folder, name, chart, Console())
    raise typer.Exit(code)
