"""Helpers of commands: parse lists with commas, and report errors by option."""

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

Device = Annotated[str, typer.Option(help="Device: cpu, cuda or cuda:N.", show_default="cuda where there is one")]
Precision = Annotated[
    str, typer.Option(help="Precision of what is computed: fp32 or bf16.", show_default="bf16 on cuda")
]
Compile = Annotated[bool | None, typer.Option(help="Compile the blocks.", show_default="on cuda alone")]
Graphs = Annotated[bool | None, typer.Option(help="Replay steps as CUDA graphs.", show_default="no")]
Jobs = Annotated[int | None, typer.Option(help="Runs at a time.", show_default="one a core on a cpu, else 1")]
MechanismOptions = Annotated[
    list[str],
    typer.Option(help="Option of a mechanism: key=value for all, mechanism.key=value for one; may be given again."),
]
Threads = Annotated[int, typer.Option(help="CPU threads; 0 leaves the choice to PyTorch.")]


class DefaultGroup(TyperGroup):
    """A group with a default command, run if none is named: ``linattn train`` is ``linattn train images``."""

    default = ""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if (not args or args[0].startswith("-")) and args != ["--help"]:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


def names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def integers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in names(text))
    except ValueError as error:
        raise typer.BadParameter(
            f"must be integers with commas between them, such as 1024,2048, got {text!r}", param_hint=f"--{option}"
        ) from error


def numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in names(text))
    except ValueError as error:
        raise typer.BadParameter(
            f"must be numbers with commas between them, such as 1e-3,3e-3, got {text!r}", param_hint=f"--{option}"
        ) from error


def settings(option: str, texts: list[str]) -> dict[str, Any]:
    """Parse ``key=value`` pairs; values that read as numbers, True, False, None or lists of these become Python's."""
    from ast import literal_eval

    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise typer.BadParameter(f"must look like key=value, got {text!r}", param_hint=f"--{option}")
        try:
            found[key.strip()] = literal_eval(value.strip())
        except (ValueError, SyntaxError):
            found[key.strip()] = value.strip()
    return found


def device_or_default(device: str) -> str:
    """The device that was given; else a GPU if there is one."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def precision_or_default(precision: str, device: str) -> str:
    """The precision that was given; else bf16 on a GPU, fp32 elsewhere."""
    return precision or ("bf16" if device.startswith("cuda") else "fp32")


def set_threads(threads: int) -> None:
    """Set the CPU threads of this process; 0 leaves the choice to PyTorch."""
    import torch

    if threads < 0:
        raise typer.BadParameter(f"must be an integer >= 0, got {threads}", param_hint="--threads")
    if threads:
        torch.set_num_threads(threads)


@contextmanager
def option_errors(
    way_out: str = "", own_options: Container[str] | None = None, arguments: Mapping[str, str] = MappingProxyType({})
) -> Iterator[None]:
    """For a wrong option or a missing extra, end the command with exit code 2 and one sentence, not a traceback.

    ``way_out`` says how to do without the extra. ``own_options``: the settings of a task that are options of the
    command; errors name all others by ``--set`` (None: all are options). ``arguments``: positional arguments, by the
    name of the option in errors, with the word that the usage line has for each.
    """
    from linattn.support.extras import MissingExtraError
    from linattn.support.options import OptionError, SettingError

    try:
        yield
    except OptionError as error:
        by_set = isinstance(error, SettingError) and own_options is not None and error.option not in own_options
        option = f"--set {error.option}" if by_set else "--" + error.option.replace("_", "-")
        hint = option if by_set else arguments.get(error.option, option)
        raise typer.BadParameter(error.message, param_hint=hint) from error
    except MissingExtraError as error:
        typer.echo(f"Error: {error}{way_out}", err=True)
        raise typer.Exit(2) from error
