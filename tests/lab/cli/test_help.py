"""The help of every command shows all that is written for it: typer takes what stands in brackets for a style."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from linattn.lab.cli.main import app


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    found = getattr(command, "commands", None)
    if found is None:
        yield path, command
    for name, own in (found or {}).items():
        yield from commands(own, (*path, name))


COMMANDS = dict(commands(get_command(app)))


def words(text: str) -> str:
    """Without borders, paddings and ends of lines; a word that is broken at a hyphen is whole again."""
    return "".join(part for part in text.split() if part != "│")


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_the_help_shows_every_word_and_every_default(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    shown = words(result.output)
    assert words(command.help) in shown
    for parameter in command.params:
        assert parameter.help, f"{parameter.name} says nothing"
        assert words(parameter.help) in shown, parameter.name
        default = getattr(parameter, "show_default", None)
        if isinstance(default, str):
            assert words(f"[default: ({default})]") in shown, parameter.name


def test_every_command_is_looked_at() -> None:
    assert {("train", "lm"), ("compare", "text"), ("generate",), ("lab", "icl")} <= set(COMMANDS)
