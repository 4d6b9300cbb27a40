"""``linattn memory``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from linattn.lab.cli.options import integers, names, option_errors, set_threads


def memory(
    device: Annotated[str, typer.Option(help="Device: cpu, cuda or cuda:N.")] = "cpu",
    tokens: Annotated[
        str, typer.Option(help="Numbers of tokens, with commas.")
    ] = "196,784,3136,6400,12544,25600,50176,70000",
    mechanisms: Annotated[
        str, typer.Option(help="Registered mechanisms, with commas; softmax is there anyway.")
    ] = "mirror,nala",
    dim: Annotated[int, typer.Option(help="Width of the block.")] = 192,
    heads: Annotated[int, typer.Option(help="Number of heads.")] = 3,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 1,
    precision: Annotated[str, typer.Option(help="fp32, bf16 (autocast), or auto: bf16 on a GPU.")] = "auto",
    chart: Annotated[bool, typer.Option(help="Draw a PNG beside the JSON (needs the extra report).")] = True,
    output: Annotated[Path | None, typer.Option(help="Folder of the results.", show_default="results/<device>")] = None,
    name: Annotated[str, typer.Option(help="Name of the files.")] = "block-memory",
    seed: Annotated[int, typer.Option(help="Seed of the weights and the tokens.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves the choice to PyTorch.")] = 0,
    max_seconds: Annotated[float, typer.Option(help="Leave out what is predicted to take longer per pass.")] = 30.0,
    max_gib: Annotated[
        float | None,
        typer.Option(
            help="Leave out what is predicted to need more.",
            show_default="half of what is free on a CPU, a GPU tries all",
        ),
    ] = None,
) -> None:
    """Memory and time of one transformer block against the number of tokens, forward with backward.

    Softmax attention stands beside the mechanisms twice: as PyTorch computes it, and with a materialised map. Each
    block is checked against fp64 first. Weights do not count, their gradients do.

    Exit code: 0 all right, 1 a row was WRONG or failed, 2 a bad option, 130 interrupted (finished rows are kept).
    """
    from linattn.lab.bench.blocks.screen import memory as run
    from linattn.lab.bench.blocks.settings import BlocksConfig
    from linattn.lab.bench.screen import Files
    from linattn.support.machine import device_folder

    set_threads(threads)
    config = BlocksConfig(
        tokens=integers("tokens", tokens),
        mechanisms=names(mechanisms),
        dim=dim,
        heads=heads,
        batch=batch,
        precision=precision,
        device=device,
        seed=seed,
        max_seconds=max_seconds,
        max_gib=max_gib,
    )
    with option_errors(", or use --no-chart"):
        config.check()
        folder = output or Path("results") / device_folder(config.torch_device)
        code = run(config, Files.in_folder(folder, name, chart), Console())
    raise typer.Exit(code)
