"""``linattn throughput``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from linattn.lab.cli.measure_options import Chart, Name, Output, Quick, Resume, Seconds, Seed
from linattn.lab.cli.options import integers, names, option_errors


def throughput(
    device: Annotated[str, typer.Option(help="Device: cuda, cuda:N or cpu.")] = "cuda",
    mechanisms: Annotated[
        str, typer.Option(help="Mechanisms, with commas; softmax is measured in any case.")
    ] = "gated,mlstm,retention,elu",
    lengths: Annotated[
        str,
        typer.Option(
            help="Lengths of the sequences, with commas.", show_default="2048,8192,32768, with --quick 16,32,64"
        ),
    ] = "",
    tokens: Annotated[
        int, typer.Option(help="Tokens of a step, a multiple of every length; 0: as many as the longest sequence has.")
    ] = 0,
    dtype: Annotated[
        str,
        typer.Option(
            help="bfloat16 (autocast around fp32 weights) or float32.", show_default="bfloat16, on a CPU float32"
        ),
    ] = "",
    kv_heads: Annotated[int, typer.Option(help="Heads of keys and values; 0: as many as of queries, 9.")] = 0,
    steps: Annotated[int, typer.Option(help="Steps that are timed for a row.")] = 6,
    backend: Annotated[
        str,
        typer.Option(
            help="Backend of torch.compile: inductor, aot_eager or eager.", show_default="inductor, on a CPU eager"
        ),
    ] = "",
    seconds: Seconds = 540.0,
    resume: Resume = False,
    quick: Quick = False,
    chart: Chart = True,
    output: Output = None,
    name: Name = "throughput",
    seed: Seed = 0,
) -> None:
    """Training tokens per second against the length of sequences, for a language model of 135 million parameters.

    A step is forward, loss, backward and AdamW, compiled, with as many tokens at every length. The same model with
    softmax on PyTorch's flash kernel stands beside the mechanisms. Before a row is timed, its loss is checked against
    the model that is not compiled, and the loss and gradients of two of its layers against plain PyTorch.

    Exit code: 0 all right, 1 a row was WRONG or failed, 2 a bad option, 130 interrupted (finished rows are kept).
    """
    from linattn.lab.bench.throughput.screen import throughput as run
    from linattn.lab.bench.throughput.settings import LENGTHS, QUICK_LENGTHS, ThroughputConfig
    from linattn.support.machine import device_folder

    on_cpu = device == "cpu"
    own = integers("lengths", lengths) or (QUICK_LENGTHS if quick else LENGTHS)
    config = ThroughputConfig(
        device=device,
        mechanisms=names(mechanisms),
        lengths=own,
        tokens=tokens or max(own),
        dtype=dtype or ("float32" if on_cpu else "bfloat16"),
        kv_heads=kv_heads,
        steps=steps,
        backend=backend or ("eager" if on_cpu else "inductor"),
        seconds=seconds,
        quick=quick,
        seed=seed,
    )
    with option_errors():
        config.check()
        folder = output or (Path("runs/bench") if quick else Path("results") / device_folder(config.torch_device))
        code = run(config, folder / f"{name}.json", Console(), resume=resume, chart=chart)
    raise typer.Exit(code)
