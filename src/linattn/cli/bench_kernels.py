"""``linattn kernels``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from linattn.cli.options import names, option_errors


def kernels(
    device: Annotated[str, typer.Option(help="cuda or cuda:N; cpu with --quick.")] = "cuda",
    cases: Annotated[
        str, typer.Option(help="Names with commas; causal-* takes all that start so.  [default: all]")
    ] = "",
    contenders: Annotated[
        str, typer.Option(help="Only contenders whose names start with these, with commas.  [default: all]")
    ] = "",
    rivals: Annotated[bool, typer.Option(help="Time fla, mlstm_kernels and softmax too, where they are.")] = True,
    seconds: Annotated[float, typer.Option(help="Begin nothing that may not end by then; --resume goes on.")] = 540.0,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32.  [default: bfloat16, on a CPU float32]")
    ] = "",
    milliseconds: Annotated[float, typer.Option(help="Of measured calls per row.")] = 100.0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the complete cases of the file that is there.")
    ] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Compile everything anew, in empty caches: shows what a first start costs.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny shapes: shows that everything runs, times nothing.")
    ] = False,
    chart: Annotated[bool, typer.Option(help="Draw a PNG beside the JSON (needs the extra report).")] = True,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the results.  [default: results/<device>, with --quick runs/bench]")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the files.")] = "kernels",
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
) -> None:
    """Time of kernels on a GPU beside rivals and the floor.

    Every row is checked against fp64 in the same run. The floor is what memory and arithmetic allow at the least, by
    the copy bandwidth and the matmul rate that the run measures first.

    Exit code: 0 all right, 1 a row of this library was WRONG or failed, 2 a bad option, 130 interrupted (finished rows
    are kept).
    """
    import os
    import tempfile
    from contextlib import ExitStack

    from linattn.bench.kernels.screen import kernels as run
    from linattn.bench.kernels.settings import KernelsConfig
    from linattn.bench.screen import Files
    from linattn.support.machine import device_folder

    config = KernelsConfig(
        device=device,
        dtype=dtype or ("float32" if device == "cpu" else "bfloat16"),
        cases=names(cases),
        contenders=names(contenders),
        rivals=rivals,
        quick=quick,
        seconds=seconds,
        milliseconds=milliseconds,
        seed=seed,
    )
    with option_errors(), ExitStack() as stack:
        config.check()
        if cold:  # before anything compiles
            caches = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="linattn-cold-", ignore_cleanup_errors=True)
            )
            os.environ["TRITON_CACHE_DIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
        folder = output or (Path("runs/bench") if quick else Path("results") / device_folder(config.torch_device))
        code = run(config, Files.in_folder(folder, name, chart), Console(), resume=resume)
    raise typer.Exit(code)
