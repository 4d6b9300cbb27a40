"""``linattn lab synth``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from linattn.lab.cli.options import Jobs, device_or_default, integers, names, numbers, option_errors
from linattn.lab.cli.shared_options import takes_shared_options
from linattn.lab.cli.text_options import TextOptions
from linattn.lab.cli.train_text import SET, host_of, no_or, task_settings

SET_HERE = ("mechanism", "hybrid", "canon", "width", "rotary", "lr", "seed", "start", "tokens")


@takes_shared_options(*SET_HERE)
def synth(
    *,
    task: Annotated[str, typer.Argument(metavar="TASK", help="depo, brevo, capo, mano or lano.")],
    scale: Annotated[
        str,
        typer.Option(
            help="Size of task, model and training: cpu or gpu, which take minutes, or paper.", show_default="by device"
        ),
    ] = "",
    changed: Annotated[list[str], SET] = [],  # noqa: B006, typer copies it
    mechanisms: Annotated[
        str,
        typer.Option(help="Mechanisms, with commas; gated:none has positions of its own, softmax:rotary+none both."),
    ] = "softmax,gated:none",
    canon: Annotated[
        str, typer.Option(help="Canon layers, with commas: none, ABCD, AbCD; each mechanism is trained with each.")
    ] = "none,ABCD",
    positions: Annotated[
        str, typer.Option(help="Positions, with commas: rotary, quarter (of a head's channels), none.")
    ] = "rotary,none",
    widths: Annotated[str, typer.Option(help="Channels of the host, with commas.", show_default="by scale")] = "",
    lr: Annotated[
        str, typer.Option(help="Learning rates; each model takes its best on held-out data.", show_default="by scale")
    ] = "",
    seeds: Annotated[int, typer.Option(help="Seeds: so many runs of each.")] = 1,
    final: Annotated[
        bool,
        typer.Option(
            "--final/--no-final",
            help="Final runs, scored on test data; without them the table has the scores that chose learning rates.",
        ),
    ] = True,
    samples: Annotated[
        int, typer.Option(help="Sentences (lano) or answers (brevo) that each trained model writes, to be checked.")
    ] = 0,
    plan: Annotated[
        bool | None,
        typer.Option(
            "--plan/--no-plan",
            help="Say how many runs and seconds it would be, and stop; or do not measure it at all.",
            show_default="say it and begin",
        ),
    ] = None,
    jobs: Jobs = None,
    shared: TextOptions,
) -> None:
    """Controlled tasks of Physics of Language Models 4.1: what a mechanism, positions and Canon layers are good for.

    depo: hops along a cycle; brevo: sorting a graph; capo: facts about people; mano: arithmetic; lano: a grammar.
    Trains every mechanism with every kind of positions and Canon layers through `linattn compare`, and writes
    table.json, results.json and report.html. Started again, it goes on.

    Exit code: 0 all right, 1 a run failed, 2 a bad option, 130 interrupted (finished runs are kept).
    """
    from linattn.lab.compare.text.settings import TextCompareConfig
    from linattn.lab.compare.workers import default_jobs
    from linattn.lab.tasks.text import text_task
    from linattn.lab.theory.synth.budgets import budget, shown_metrics
    from linattn.lab.theory.synth.run import run
    from linattn.lab.theory.synth.settings import SynthConfig
    from linattn.lab.train.text.recipes import configure, recipe_settings

    with option_errors(own_options=(), arguments={"task": "TASK"}):
        on_gpu = device_or_default(shared.device).startswith("cuda")
        chosen = budget(task, scale or ("gpu" if on_gpu else "cpu"))
        recipe = shared.recipe or chosen.recipe
        settings = recipe_settings(recipe, task) | chosen.settings | task_settings(None, changed)
        made = text_task(task, **settings)
        lrs = numbers("lr", lr) or chosen.lrs
        given: dict[str, Any] = {name: value for name, value in shared.changes().items() if value is not None}
        # Runs are short: compiling would take longer than it saves.
        given |= {"compile": bool(shared.compile), "lr": lrs[0] if len(lrs) == 1 else None}
        train = configure(made, chosen.training(given), recipe)
        host = host_of(replace(shared, size=shared.size or chosen.host["size"]), made)
        host = replace(
            host,
            mechanism="softmax",
            depth=shared.depth or chosen.host["depth"],
            heads=shared.heads or chosen.host.get("heads"),
            head_dim=None if shared.heads else chosen.host.get("head_dim"),
            tied=chosen.host.get("tied"),
        )
        compared = TextCompareConfig(
            task,
            settings,
            names(mechanisms),
            tuple(no_or(letters) for letters in names(canon)) or (None,),
            integers("widths", widths) or chosen.widths,
            host,
            False,
            train,
            seeds,
            lrs if len(lrs) > 1 else (),
            shared.output or Path("runs") / f"lab-synth-{task}",
            default_jobs(train.device) if jobs is None else jobs,
        )
        config = SynthConfig(compared, names(positions), shown_metrics(made, chosen), samples, final)
        code = run(config, Console(), plan_only=plan is True, measure=plan is not False)
    raise typer.Exit(code)
