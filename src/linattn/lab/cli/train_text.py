"""``linattn train lm``, ``linattn train mlm`` and ``linattn train task``."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from linattn.lab.cli.options import option_errors, settings
from linattn.lab.cli.shared_options import takes_shared_options
from linattn.lab.cli.text_options import TextOptions

if TYPE_CHECKING:
    from linattn.lab.train.text.hosts import HostOptions

DATA = typer.Option(
    help="What to read: a text file, also .gz or .jsonl, a folder of .txt files, or what the task asks for."
)
SET = typer.Option("--set", help="Setting of the task: key=value; may be given again. A wrong one lists all.")
OWN_OPTIONS = ("data",)  # settings of tasks that are options of commands; others are given by --set


@takes_shared_options()
def lm(
    *,
    data: Annotated[Path, DATA],
    length: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    tokenizer: Annotated[str, typer.Option(help="Folder of a tokenizer of transformers.", show_default="bytes")] = "",
    changed: Annotated[list[str], SET] = [],  # noqa: B006, typer copies it
    shared: TextOptions,
) -> None:
    """Train a language model on a text: next tokens. Started again with the same options, it goes on.

    `linattn generate` then writes with it. Exit code: 0 all right, 1 the training diverged, 2 a bad option,
    130 interrupted (the same command goes on).
    """
    _train("text", data, shared, changed, length=length, tokenizer=tokenizer or None)


@takes_shared_options()
def mlm(
    *,
    data: Annotated[Path, DATA],
    length: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    tokenizer: Annotated[str, typer.Option(help="Folder of a tokenizer of transformers.", show_default="bytes")] = "",
    changed: Annotated[list[str], SET] = [],  # noqa: B006
    shared: TextOptions,
) -> None:
    """Train an encoder on a text: masked tokens. Started again with the same options, it goes on.

    Exit code: 0 all right, 1 the training diverged, 2 a bad option, 130 interrupted (the same command goes on).
    """
    _train("masked-text", data, shared, changed, length=length, tokenizer=tokenizer or None)


@takes_shared_options()
def task(
    *,
    name: Annotated[
        str, typer.Argument(metavar="TASK", help="mqar, listops, regbench, mad-recall, ...; a wrong one lists all.")
    ],
    data: Annotated[Path | None, DATA] = None,
    changed: Annotated[list[str], SET] = [],  # noqa: B006
    shared: TextOptions,
) -> None:
    """Train on a task of sequences, drawn or from files. Started again with the same options, it goes on.

    Exit code: 0 all right, 1 the training diverged, 2 a bad option, 130 interrupted (the same command goes on).
    """
    _train(name, data, shared, changed)


def _train(name: str, data: Path | None, shared: TextOptions, changed: list[str], **own: Any) -> None:
    from linattn.lab.train.text.recipes import create_task
    from linattn.lab.train.text.screen import TextJob, train_text_on_screen

    with option_errors(own_options=(*OWN_OPTIONS, *own), arguments={"task": "TASK"}):
        made = create_task(name, task_settings(data, changed, **own), shared.recipe)
        host = host_of(shared, made)
        label = (shared.hybrid or shared.mechanism).replace("*", "x").replace(",", "-").replace("/", "-")
        label += "" if host.canon is None else f"-{host.canon}"
        folder = shared.output or Path("runs/train") / f"{made.name}-{label}-seed{shared.seed}"
        job = TextJob(made, host, folder, shared.recipe, shared.changes(), shared.tokens, shared.start)
        code = train_text_on_screen(job, Console())
    raise typer.Exit(code)


def task_settings(data: Path | None, changed: list[str], **own: Any) -> dict[str, Any]:
    """The settings of a task, from options of the command and from ``--set``."""
    given = {key: value for key, value in own.items() if value is not None}
    return given | ({} if data is None else {"data": str(data)}) | settings("set", changed)


def host_of(shared: TextOptions, made: Any) -> "HostOptions":
    """The host for the task ``made``, by the options; others are those of the recipe, if one is named."""
    from linattn.lab.train.mechanism_options import parse_options
    from linattn.lab.train.text.hosts import AUTOMATIC, HostOptions
    from linattn.lab.train.text.recipes import host_of_recipe, size_of
    from linattn.models.language.options import ATTENTION_GATES, ATTENTION_NORMS

    published = {} if shared.size else host_of_recipe(shared.recipe)
    return HostOptions(
        shared.size or size_of(made),
        shared.hybrid or shared.mechanism,
        no_or(shared.canon),
        parse_options(shared.option),
        shared.width or published.get("width"),
        shared.depth or published.get("depth"),
        shared.heads or published.get("heads"),
        shared.mlp_width,
        shared.rotary,
        _one_of("attention_norm", shared.attention_norm, (AUTOMATIC, *ATTENTION_NORMS)),
        _one_of("attention_gate", shared.attention_gate, ATTENTION_GATES),
        published.get("dropout", 0.0) if shared.dropout is None else shared.dropout,
        None if shared.heads else published.get("head_dim"),
        published.get("tied"),
    )


def no_or(text: str) -> str | None:
    """The text, or None if it is ``none`` or empty."""
    return None if text in ("", "none") else text


def _one_of(option: str, text: str, allowed: Iterable[str | None]) -> str | None:
    """As :func:`no_or`, for an option with few values; errors list these values as they are typed."""
    from linattn.support.options import check_option

    check_option(option, text or "none", [value or "none" for value in allowed])
    return no_or(text)
