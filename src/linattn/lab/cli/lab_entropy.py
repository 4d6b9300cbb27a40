"""``linattn lab entropy``."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from linattn.lab.cli.lab_options import Chart, Name, Output, lab_folder
from linattn.lab.cli.options import Device, Threads, device_or_default, names, numbers, option_errors, set_threads


def entropy(
    mechanisms: Annotated[
        str, typer.Option(help="Mechanisms, with commas.", show_default="all that are registered")
    ] = "",
    hosts: Annotated[
        str,
        typer.Option(
            help="Mechanisms to train a small vision transformer with, commas between them; all mechanisms get the "
            "activations of the first one. all: every mechanism; none: random activations alone.",
            show_default="softmax,relu,pola,nala,mirror, with --quick softmax",
        ),
    ] = "",
    data: Annotated[str, typer.Option(help="Data of the hosts, as for `linattn train images`.")] = "digits",
    size: Annotated[str, typer.Option(help="Size of the hosts: digits, pico, nano, tiny, small or base.")] = "digits",
    patch_size: Annotated[int, typer.Option(help="Pixels of a token's side.")] = 2,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs that a host is trained for.", show_default="10, with --quick 1")
    ] = None,
    images: Annotated[
        int | None, typer.Option(help="Test images to look at.", show_default="32, with --quick 4")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="In place of training: a folder of `linattn train`, or a language model for transformers."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="File that a language model reads.")] = None,
    scales: Annotated[str, typer.Option(help="Factors of all queries, with commas, 1 among them.")] = "",
    batch: Annotated[
        int | None,
        typer.Option(help="Sequences of random activations, or of text.", show_default="2, with --quick 1"),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="Heads of random activations.", show_default="4, with --quick 2")
    ] = None,
    head_dim: Annotated[
        int | None,
        typer.Option(help="Width of a head of random activations.", show_default="32, with --quick 16"),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of random activations, or of text.", show_default="64, with --quick 32"),
    ] = None,
    device: Device = "",
    seed: Annotated[int, typer.Option(help="Seed of activations, weights and training.")] = 0,
    threads: Threads = 0,
    chart: Chart = True,
    output: Output = None,
    name: Name = "lab-entropy",
    quick: Annotated[bool, typer.Option("--quick", help="One host, one epoch: shows that everything runs.")] = False,
) -> None:
    """How spread out attention is, and whether it sees the length of its queries, for every mechanism.

    Theorems of NaLaFormer, PolaFormer and MirrorLA are checked first. Then the queries are made longer and shorter, on
    random activations and on those of trained models, and the entropy of the rows of attention is measured.

    Exit code: 0 all right, 1 a check failed, 2 a bad option or a package that is missing.
    """
    from linattn.lab.theory.entropy.run import entropy_on_screen
    from linattn.lab.theory.entropy.settings import QUICK, SCALES, EntropyConfig
    from linattn.mechanisms.registry import list_mechanisms

    set_threads(threads)
    device = device_or_default(device)
    every = tuple(list_mechanisms(bidirectional=True))
    sizes = {
        "hosts": {"all": every, "none": (), "": None}.get(hosts, names(hosts)),
        "epochs": epochs,
        "images": images,
        "batch": batch,
        "heads": heads,
        "head_dim": head_dim,
        "tokens": tokens,
    }
    given: dict[str, Any] = {key: value for key, value in sizes.items() if value is not None}
    config = EntropyConfig(
        **(QUICK if quick else {}) | given,
        mechanisms=names(mechanisms),
        scales=numbers("scales", scales) or SCALES,
        data=data,
        size=size,
        patch_size=patch_size,
        checkpoint=checkpoint,
        text=text,
        device=device,
        seed=seed,
    )
    with option_errors(", or use --no-chart"):
        config.check()
        folder = lab_folder(output, device, quick=quick)
        code = entropy_on_screen(config, folder, name, chart, Console())
    raise typer.Exit(code)
