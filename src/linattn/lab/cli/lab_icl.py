"""``linattn lab icl``."""

from typing import Annotated, Any

import typer
from rich.console import Console

from linattn.lab.cli.lab_options import Chart, Name, Output, lab_folder
from linattn.lab.cli.measure_options import Resume
from linattn.lab.cli.options import Device, Threads, device_or_default, integers, names, option_errors, set_threads


def icl(
    families: Annotated[
        str,
        typer.Option(
            help="Experiments, with commas: independent, retrieval, alignment, low-rank, low-rank-update, drift.",
            show_default="all",
        ),
    ] = "",
    models: Annotated[
        str,
        typer.Option(
            help="Models, with commas: linear, h3, gated, canon, or any causal mechanism by its name.",
            show_default="linear and h3; all of them on independent examples and drifting tasks",
        ),
    ] = "",
    d: Annotated[
        int | None, typer.Option("--dimension", help="Dimension of the features.", show_default="20, with --quick 5")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Numbers of examples, with commas.", show_default="5,10,20,40,60, with --quick 3,6,12")
    ] = "",
    seeds: Annotated[int | None, typer.Option(help="Models of each kind.", show_default="2, with --quick 1")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Training steps of a model.", show_default="2000, with --quick 400")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Tasks in a training step.", show_default="512, with --quick 256")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Largest learning rate.", show_default="0.01, with --quick 0.03")
    ] = None,
    tests: Annotated[
        int | None, typer.Option(help="Tasks that the risk is measured on.", show_default="262144, with --quick 32768")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Relative distance to the formula.", show_default="0.02, with --quick 0.05")
    ] = None,
    device: Device = "",
    threads: Threads = 0,
    seed: Annotated[int, typer.Option(help="Seed of weights and tasks.")] = 0,
    resume: Resume = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Five dimensions: the whole experiment in minutes on a CPU.")
    ] = False,
    chart: Chart = True,
    output: Output = None,
    name: Name = "lab-icl",
) -> None:
    """In-context linear estimation: one-layer models trained beside the best risk in closed form.

    Linear attention is one step of preconditioned gradient descent, H3 one with weights for the examples. Both are
    trained on independent, retrieved, aligned and drifting examples, at low rank and as low-rank updates (LoRA), with
    gated linear attention and Canon beside them. Figures show trained models solid and formulas dotted. --quick is the
    whole experiment in five dimensions: minutes on a CPU.

    Exit code: 0 all right, 1 the best seed of a model is farther from its formula than the tolerance, 2 a bad option,
    130 interrupted (--resume goes on).
    """
    from linattn.lab.theory.icl.screen import icl_on_screen
    from linattn.lab.theory.icl.settings import QUICK, IclConfig

    set_threads(threads)
    device = device_or_default(device)
    given: dict[str, Any] = {
        "families": names(families) or None,
        "models": names(models) or None,
        "d": d,
        "lengths": integers("lengths", lengths) or None,
        "seeds": seeds,
        "steps": steps,
        "batch": batch,
        "lr": lr,
        "tests": tests,
        "tolerance": tolerance,
    }
    chosen = (QUICK if quick else {}) | {key: value for key, value in given.items() if value is not None}
    with option_errors(", or use --no-chart"):
        config = IclConfig(device=device, seed=seed, **chosen)
        config.check()
        folder = lab_folder(output, device, quick=quick)
        code = icl_on_screen(config, folder, name, Console(), resume=resume, charts=chart)
    raise typer.Exit(code)
