"""``linattn models``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from linattn.lab.cli.options import names, option_errors


def models(
    device: Annotated[str, typer.Option(help="cuda or cuda:N; cpu with --quick.")] = "cuda",
    cases: Annotated[
        str,
        typer.Option(
            help="Cases, with commas: vit-224, vit-512, language-8192-b1, language-8192-b4 (the default: these four); "
            "backbones, the smallest of every family at 224, 384, 512 and 1024 pixels, backbones-224 at one of these; "
            "presets and presets-224, all models of all families; "
            "any model of timm's linattn_* by name and size, such as nalaformer_small-512."
        ),
    ] = "",
    mechanisms: Annotated[
        str,
        typer.Option(
            help="Mechanisms, with commas; softmax is measured in any case.", show_default="those of each case"
        ),
    ] = "",
    modes: Annotated[
        str,
        typer.Option(
            help="How a step runs, with commas: compiled, cuda-graph (of the compiled step), reduce-overhead "
            "(PyTorch's own), eager-graph (a CUDA graph of the step without torch.compile: the "
            "shortest to prepare, for many models)."
        ),
    ] = "compiled,cuda-graph",
    seconds: Annotated[float, typer.Option(help="Begin nothing after that; --resume goes on.")] = 540.0,
    milliseconds: Annotated[float, typer.Option(help="Milliseconds of measured steps for a row.")] = 500.0,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Processes that compile everything, and check the rows of eager-graph, beforehand; 0: none.",
            show_default="one a core but two, on a CPU 0",
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="Backend of torch.compile: inductor, aot_eager or eager.", show_default="inductor, on a CPU eager"
        ),
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rows of the file that is there, measure what it lacks.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny models: shows that everything runs, times nothing.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the results.", show_default="results/<device>, with --quick runs/bench"),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the file.")] = "models",
    seed: Annotated[int, typer.Option(help="Seed of weights and inputs.")] = 0,
) -> None:
    """Training steps of whole models beside the same models on softmax.

    DeiT-small at 224 and 512 pixels, and a language model of 135 million parameters at 8192 tokens; by name the
    backbones of papers, with a chart of time and memory over softmax against the size of images. Each row's loss and
    gradients are checked against plain PyTorch in the same run, of a backbone in a model with one block a stage; every
    call of attention says what it takes, and a profile says which kernels the time goes to.

    Exit code: 0 all right, 1 a row was WRONG, failed or not on kernels, 2 a bad option, 130 interrupted (finished rows
    are kept).
    """
    from linattn.lab.bench.models.screen import models as run
    from linattn.lab.bench.models.settings import ModelsConfig
    from linattn.support.machine import cores, device_folder

    on_cpu = device == "cpu"
    config = ModelsConfig(
        device=device,
        cases=names(cases),
        mechanisms=names(mechanisms),
        modes=names(modes),
        backend=backend or ("eager" if on_cpu else "inductor"),
        quick=quick,
        seconds=seconds,
        milliseconds=milliseconds,
        processes=(0 if on_cpu else max(1, cores() - 2)) if processes is None else processes,
        seed=seed,
    )
    with option_errors():
        config.check()
        folder = output or (Path("runs/bench") if quick else Path("results") / device_folder(config.torch_device))
        code = run(config, folder / f"{name}.json", Console(), resume=resume)
    raise typer.Exit(code)
