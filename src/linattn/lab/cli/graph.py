"""``linattn graph``: the space that suits a graph, models compared on it, and what they cost as it grows."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from linattn.lab.cli.options import (
    Device,
    Threads,
    device_or_default,
    integers,
    names,
    numbers,
    option_errors,
    set_threads,
    settings,
)

app = typer.Typer(help="Graph models: space search, comparison, cost.", no_args_is_help=True)

DATA = (
    "A folder of PyTorch Geometric's raw files, an .npz file, an edge list, or a generated graph such as tree:4:6, "
    "cycle:10, grid:32:32, random:1000:8, communities:1000:4."
)


@app.command()
def search(
    data: Annotated[str, typer.Argument(help=DATA)],
    dimension: Annotated[int, typer.Option(help="q + p, even.")] = 16,
    references: Annotated[int, typer.Option(help="Nodes that distances are measured from.")] = 50,
    pairs: Annotated[int, typer.Option(help="Pairs of neighbours looked at around a node.")] = 50,
    seed: Annotated[int, typer.Option(help="Seed of both draws.")] = 0,
) -> None:
    """Print the signature (q, p) = (time, space) that suits a graph, with a histogram of its curvature.

    Exit code: 0 all right, 2 a bad option.
    """
    from linattn.lab.train.graph.search_screen import search_on_screen

    with option_errors(arguments={"data": "DATA"}):
        search_on_screen(data, dimension, references, pairs, seed, Console())


@app.command()
def compare(
    data: Annotated[str, typer.Option(help=DATA)],
    models: Annotated[
        str, typer.Option(help="Models, with commas; with another mechanism: euclidean+relu. A wrong one lists all.")
    ] = "sgc,gcn,euclidean,pseudo_riemannian",
    task: Annotated[str, typer.Option(help="nodes (their classes) or links.")] = "nodes",
    seeds: Annotated[int, typer.Option(help="Runs of each model.")] = 5,
    epochs: Annotated[
        int | None, typer.Option(help="Steps over the whole graph.", show_default="300; of a paper's scripts 1000")
    ] = None,
    lr: Annotated[
        str, typer.Option(help="Learning rate; of several, each takes its best on validation.", show_default="by model")
    ] = "",
    hidden: Annotated[int | None, typer.Option(help="Width of all models.", show_default="by model")] = None,
    weight_decay: Annotated[
        str,
        typer.Option(
            help="Weight decay of all parameters; several: a grid with --lr and --dropout.", show_default="by model"
        ),
    ] = "",
    dropout: Annotated[
        str, typer.Option(help="Dropout of the features; several: a grid.", show_default="by model")
    ] = "",
    grid_seeds: Annotated[int, typer.Option(help="Runs at each point of a grid of several settings.")] = 1,
    patience: Annotated[
        int | None, typer.Option(help="Evaluations without a better one before it stops; 0: never.")
    ] = None,
    eval_every: Annotated[int | None, typer.Option(help="Epochs between evaluations.", show_default="1")] = None,
    split: Annotated[
        str,
        typer.Option(
            help="How nodes are split: given, stratified or per-class.", show_default="given, else stratified"
        ),
    ] = "auto",
    paper: Annotated[
        bool,
        typer.Option(
            help="Settings of the paper's scripts for pseudo_riemannian: on Cora, Citeseer, PubMed, and links of "
            "tree:4:6."
        ),
    ] = False,
    option: Annotated[
        list[str],
        typer.Option(help="Option of models: key=value for all, model.key=value for one; may be given again."),
    ] = [],  # noqa: B006, typer copies it
    device: Device = "",
    threads: Threads = 0,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the comparison.", show_default="runs/graph-<data>-<task>")
    ] = None,
) -> None:
    """Train models on one graph; table, JSON, CSV and a page. Started again, it goes on.

    Each has the settings of its recipe. Of several values of --lr, --weight-decay and --dropout every model tries all
    combinations, the same for all, and takes what is best on validation data.

    The epoch that counts is chosen on validation data, test data is looked at once. Splits that are drawn, and all
    links, are drawn anew for each seed, the same for all models.

    Exit code: 0 all right, 1 a run failed, 2 a bad option, 130 interrupted (finished runs are kept).
    """

    from linattn.lab.compare.compare import compare as run
    from linattn.lab.compare.graph.report import write_graph_report
    from linattn.lab.compare.graph.settings import GraphCompareConfig

    set_threads(threads)
    lrs = numbers("lr", lr)
    changes: dict[str, Any] = {
        "epochs": epochs,
        "lr": lrs[0] if len(lrs) == 1 else None,
        "patience": patience,
        "eval_every": eval_every,
        "split": None if split == "auto" else split,
        "device": device_or_default(device),
    }
    folder = output or Path("runs") / f"graph-{data.strip('/').split('/')[-1].replace(':', '-')}-{task}"
    with option_errors():
        config = GraphCompareConfig(
            data, names(models), task, hidden, _by_model(option), changes, seeds, lrs if len(lrs) > 1 else (),
            numbers("weight_decay", weight_decay), numbers("dropout", dropout), paper, grid_seeds, folder,
        )  # fmt: skip
        code = run(config, Console())
        if (folder / "results.json").exists() and find_spec("matplotlib") is not None:
            Console().print(f"report: {write_graph_report(folder)}", soft_wrap=True)
    raise typer.Exit(code)


@app.command()
def scaling(
    models: Annotated[str, typer.Option(help="Models, with commas.")] = "gcn,euclidean,pseudo_riemannian",
    nodes: Annotated[
        str, typer.Option(help="Sizes of the generated graphs, with commas.")
    ] = "1000,10000,100000,1000000",
    hidden: Annotated[int | None, typer.Option(help="Width of all models.", show_default="by model")] = None,
    device: Device = "",
    repeats: Annotated[int, typer.Option(help="Steps timed, at least.")] = 5,
    max_seconds: Annotated[float, typer.Option(help="Leave out sizes whose step is predicted to take longer.")] = 60.0,
    chart: Annotated[bool, typer.Option(help="Draw a PNG beside the JSON (needs the extra report).")] = True,
    threads: Threads = 0,
    seed: Annotated[int, typer.Option(help="Seed of graphs and weights.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder of the results.", show_default="results/<device>")] = None,
    name: Annotated[str, typer.Option(help="Name of the files.")] = "graph-scaling",
) -> None:
    """Time and memory of one training step against the number of nodes, each model checked against fp64.

    Exit code: 0 all right, 1 a row was WRONG, 2 a bad option, 130 interrupted (finished rows are kept).
    """
    import torch

    from linattn.lab.compare.graph.scaling import ScalingConfig
    from linattn.lab.compare.graph.scaling_screen import scaling_on_screen
    from linattn.support.machine import device_folder

    set_threads(threads)
    device = device_or_default(device)
    config = ScalingConfig(names(models), integers("nodes", nodes), hidden, device, repeats, max_seconds, seed)
    with option_errors(", or use --no-chart"):
        config.check()
        folder = output or Path("results") / device_folder(torch.device(device))
        code = scaling_on_screen(config, folder / f"{name}.json", chart, Console())
    raise typer.Exit(code)


def _by_model(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Parse ``key=value`` and ``model.key=value`` into options by model; options for all are under the empty name."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        model, dot, own = key.rpartition(".")
        found.setdefault(model if dot else "", {}).update(settings("option", [f"{own if dot else key}{equals}{value}"]))
    return found
