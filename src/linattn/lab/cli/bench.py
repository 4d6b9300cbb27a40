"""``linattn bench``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from linattn.lab.cli.options import integers, names, option_errors, set_threads

QUICK_LENGTHS = "256,512,1024"


def bench(
    device: Annotated[str, typer.Option(help="Device: cpu, cuda or cuda:N.")] = "cpu",
    lengths: Annotated[str, typer.Option(help="Sequence lengths, with commas.")] = "1024,2048,4096,8192,16384,32768",
    impl: Annotated[
        str,
        typer.Option(help="Forms of linear attention, with commas: auto, reference (quadratic), recurrent, chunked."),
    ] = "chunked,recurrent,reference",
    mechanisms: Annotated[str, typer.Option(help="Registered mechanisms to measure too, with commas.")] = "",
    batch: Annotated[int, typer.Option(help="Batch size.")] = 1,
    heads: Annotated[int, typer.Option(help="Number of heads.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    causal: Annotated[
        bool, typer.Option("--causal/--bidirectional", help="Whether a token sees all tokens, or none that follow.")
    ] = True,
    decay: Annotated[str, typer.Option(help="none, head, token or channel.")] = "none",
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    backward: Annotated[bool, typer.Option(help="Measure forward with backward too.")] = True,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
    chart: Annotated[bool, typer.Option(help="Draw a PNG beside the JSON (needs the extra report).")] = True,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the results.", show_default="results/<device>, with --quick runs/bench"),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the files.", show_default="says what was measured")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves the choice to PyTorch.")] = 0,
    max_seconds: Annotated[float, typer.Option(help="Leave out what is predicted to take longer per call.")] = 5.0,
    max_gib: Annotated[
        float | None,
        typer.Option(help="Leave out what is predicted to need more memory.", show_default="half of what is free"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"A short run: lengths {QUICK_LENGTHS}, few repeats.")] = False,
) -> None:
    """Time and memory of linear attention beside softmax attention, each row checked against fp64.

    Exit code: 0 all right, 1 a row was WRONG or failed, 2 a bad option, 130 interrupted (finished rows are kept).
    """
    from linattn.lab.bench.screen import Files
    from linattn.lab.bench.screen import bench as run
    from linattn.lab.bench.settings import BenchConfig
    from linattn.support.machine import device_folder

    set_threads(threads)
    own_lengths = integers("lengths", lengths) != BenchConfig.lengths
    config = BenchConfig(
        lengths=integers("lengths", QUICK_LENGTHS if quick and not own_lengths else lengths),
        impl=names(impl),
        mechanisms=names(mechanisms),
        batch=batch,
        heads=heads,
        head_dim=head_dim,
        causal=causal,
        decay=decay,
        dtype=dtype,
        device=device,
        backward=backward,
        memory=memory,
        seed=seed,
        min_seconds=0.05 if quick else 0.5,
        min_repeats=3 if quick else 5,
        max_seconds=max_seconds,
        max_gib=max_gib,
    )
    with option_errors(", or use --no-chart"):
        config.check()
        folder = output or (Path("runs/bench") if quick else Path("results") / device_folder(config.torch_device))
        code = run(config, Files.in_folder(folder, name or config.name, chart), Console())
    raise typer.Exit(code)
