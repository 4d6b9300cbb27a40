"""``linattn compare --task ...``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from linattn.lab.cli.options import Jobs, integers, names, numbers, option_errors
from linattn.lab.cli.shared_options import takes_shared_options
from linattn.lab.cli.text_options import TextOptions
from linattn.lab.cli.train_text import DATA, OWN_OPTIONS, SET, host_of, no_or, task_settings

ONE_OF_MANY = ("mechanism", "hybrid", "canon", "width", "lr", "seed", "start")


@takes_shared_options(*ONE_OF_MANY)
def text(
    *,
    task: Annotated[str, typer.Option(help="text, mqar, listops, lra-text, ...; a wrong one lists all.")],
    data: Annotated[Path | None, DATA] = None,
    changed: Annotated[list[str], SET] = [],  # noqa: B006, typer copies it
    mechanisms: Annotated[
        str,
        typer.Option(
            help="Mechanisms, with commas; a model whose layers differ is written with slashes: gated*3/softmax."
        ),
    ] = "softmax,elu,gated,mlstm,zeros",
    canon: Annotated[
        str, typer.Option(help="Canon layers, with commas: none, ABCD, AbCD; each mechanism is trained with each.")
    ] = "none",
    widths: Annotated[
        str,
        typer.Option(
            help="Channels of the model, with commas; each mechanism is trained in each.", show_default="by --size"
        ),
    ] = "",
    seeds: Annotated[int, typer.Option(help="Seeds: so many runs of each.")] = 2,
    lr: Annotated[
        str,
        typer.Option(
            help="Learning rates, with commas; of several, each model takes its best on held-out data.",
            show_default="by --recipe",
        ),
    ] = "",
    equal_parameters: Annotated[
        bool, typer.Option(help="Widen or narrow feed-forward parts until all have the parameters of the first.")
    ] = False,
    jobs: Jobs = None,
    weights: Annotated[bool, typer.Option(help="Keep the weights of every run.")] = True,
    shared: TextOptions,
) -> None:
    """Train mechanisms on text or a task of sequences; table, CSV, charts and report.html. Started again, it goes on.

    Exit code: 0 all right, 1 a run failed, 2 a bad option, 130 interrupted (finished runs are kept).
    """
    from linattn.lab.compare.compare import compare
    from linattn.lab.compare.text.settings import TextCompareConfig
    from linattn.lab.compare.workers import default_jobs
    from linattn.lab.train.text.recipes import configure, task_with_settings
    from linattn.support.extras import need

    with option_errors(own_options=OWN_OPTIONS):
        need("a comparison of language models", "accelerate", "transformers", "safetensors")
        lrs, channels = numbers("lr", lr), integers("widths", widths)
        made, settings = task_with_settings(task, task_settings(data, changed), shared.recipe)
        changes = shared.changes() | {"lr": lrs[0] if len(lrs) == 1 else None}
        train = configure(made, changes, shared.recipe, shared.tokens)
        host = host_of(shared, made)
        config = TextCompareConfig(
            task,
            settings,
            names(mechanisms),
            tuple(no_or(letters) for letters in names(canon)) or (None,),
            channels or (host.width,),
            replace(host, mechanism="softmax"),
            equal_parameters,
            train,
            seeds,
            lrs if len(lrs) > 1 else (),
            shared.output or Path("runs") / f"compare-{task}",
            default_jobs(train.device) if jobs is None else jobs,
            weights,
        )
        code = compare(config, Console())
    raise typer.Exit(code)
