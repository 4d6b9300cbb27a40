"""``linattn kernels``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from linattn.lab.cli.options import names, option_errors


def kernels(
    device: Annotated[str, typer.Option(help="cuda or cuda:N; cpu with --quick.")] = "cuda",
    cases: Annotated[
        str, typer.Option(help="Cases, with commas; causal-* takes all that start so.", show_default="all")
    ] = "",
    contenders: Annotated[
        str, typer.Option(help="Only contenders whose names start with these, with commas.", show_default="all")
    ] = "",
    rivals: Annotated[
        str,
        typer.Option(
            help="Groups with commas, or none: torch (eager, compiled), softmax, fla and mlstm_kernels if installed."
        ),
    ] = "torch,softmax,fla,mlstm_kernels",
    seconds: Annotated[float, typer.Option(help="Begin nothing after that; --resume goes on.")] = 540.0,
    dtype: Annotated[
        str,
        typer.Option(
            help="Type of the inputs: bfloat16, float16 or float32.", show_default="bfloat16, on a CPU float32"
        ),
    ] = "",
    milliseconds: Annotated[float, typer.Option(help="Milliseconds of measured calls for a row.")] = 60.0,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Processes that compile everything beforehand; 0: none.", show_default="one a core but two, on a CPU 0"
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rows of the file that is there, measure what it lacks.")
    ] = False,
    cold: Annotated[
        bool,
        typer.Option(help="Time first calls in fresh processes with empty caches too.", show_default="not on a CPU"),
    ] = True,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny shapes: shows that everything runs, times nothing.")
    ] = False,
    chart: Annotated[bool, typer.Option(help="Draw a PNG beside the JSON (needs the extra report).")] = True,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the results.", show_default="results/<device>, with --quick runs/bench"),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the files.")] = "kernels",
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
) -> None:
    """Time of kernels on a GPU beside rivals and the floor.

    Every row is checked against fp64 in the same run. The floor is what memory and arithmetic allow at the least, by
    the copy bandwidth and the matmul rate that the run measures first.

    This library is timed in every case first, then what goals are set against, then the rest; on a GPU all of it runs
    in processes of its own, so that a crash costs one row.

    Exit code: 0 all right, 1 a row of this library was WRONG or failed, 2 a bad option, 130 interrupted (finished rows
    are kept).
    """
    from linattn.lab.bench.kernels.screen import kernels as run
    from linattn.lab.bench.kernels.settings import KernelsConfig
    from linattn.lab.bench.screen import Files
    from linattn.support.machine import cores, device_folder

    on_cpu = device == "cpu"
    config = KernelsConfig(
        device=device,
        dtype=dtype or ("float32" if on_cpu else "bfloat16"),
        cases=names(cases),
        contenders=names(contenders),
        rivals=() if rivals == "none" else names(rivals),
        quick=quick,
        seconds=seconds,
        milliseconds=milliseconds,
        processes=(0 if on_cpu else max(1, cores() - 2)) if processes is None else processes,
        cold=cold and not on_cpu,
        seed=seed,
    )
    with option_errors(", or use --no-chart"):
        config.check()
        folder = output or (Path("runs/bench") if quick else Path("results") / device_folder(config.torch_device))
        code = run(config, Files.in_folder(folder, name, chart), Console(), resume=resume)
    raise typer.Exit(code)
