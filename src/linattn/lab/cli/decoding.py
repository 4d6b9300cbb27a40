"""``linattn decoding``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from linattn.lab.cli.measure_options import Chart, Name, Output, Quick, Resume, Seconds, Seed
from linattn.lab.cli.options import integers, names, option_errors


def decoding(
    device: Annotated[str, typer.Option(help="Device: cuda, cuda:N or cpu.")] = "cuda",
    mechanisms: Annotated[
        str, typer.Option(help="Mechanisms, with commas; softmax is measured in any case.")
    ] = "gated,mlstm,retention,elu",
    contexts: Annotated[
        str,
        typer.Option(
            help="Tokens before the one that is decoded, with commas.",
            show_default="1024 to 131072 by factors of two, with --quick 24,48,96",
        ),
    ] = "",
    batch: Annotated[str, typer.Option(help="Sequences that are decoded together, with commas.")] = "1,16",
    modes: Annotated[
        str,
        typer.Option(
            help="How a step runs, with commas: eager, cuda-graph (captured and replayed).",
            show_default="both, on a CPU eager",
        ),
    ] = "",
    dtype: Annotated[
        str, typer.Option(help="Type of the weights: bfloat16 or float32.", show_default="bfloat16, on a CPU float32")
    ] = "",
    kv_heads: Annotated[
        int, typer.Option(help="Heads of keys and values; 0: as many as of queries, 9. Fewer make a smaller cache.")
    ] = 0,
    steps: Annotated[int, typer.Option(help="Tokens that are timed for a row.")] = 16,
    piece: Annotated[int, typer.Option(help="Tokens of a context that are read at a time.")] = 8192,
    seconds: Seconds = 540.0,
    resume: Resume = False,
    quick: Quick = False,
    chart: Chart = True,
    output: Output = None,
    name: Name = "decoding",
    seed: Seed = 0,
) -> None:
    """Time and memory of a decoded token against the context, for a language model of 135 million parameters.

    The same model with softmax stands beside the mechanisms, its keys and values in a cache that is allocated once and
    written in place. Before a row is timed, the logits of its steps are checked against those of the whole context read
    at once in higher precision. The context is read in pieces, and its state is what the steps start from.

    Exit code: 0 all right, 1 a row was WRONG or failed, 2 a bad option, 130 interrupted (finished rows are kept).
    """
    from linattn.lab.bench.decoding.screen import decoding as run
    from linattn.lab.bench.decoding.settings import CONTEXTS, EAGER, MODES, QUICK_CONTEXTS, DecodingConfig
    from linattn.support.machine import device_folder

    on_cpu = device == "cpu"
    config = DecodingConfig(
        device=device,
        mechanisms=names(mechanisms),
        contexts=integers("contexts", contexts) or (QUICK_CONTEXTS if quick else CONTEXTS),
        batches=integers("batch", batch),
        modes=names(modes) or ((EAGER,) if on_cpu else MODES),
        dtype=dtype or ("float32" if on_cpu else "bfloat16"),
        kv_heads=kv_heads,
        steps=steps,
        piece=piece,
        seconds=seconds,
        quick=quick,
        seed=seed,
    )
    with option_errors():
        config.check()
        folder = output or (Path("runs/bench") if quick else Path("results") / device_folder(config.torch_device))
        code = run(config, folder / f"{name}.json", Console(), resume=resume, chart=chart)
    raise typer.Exit(code)
