"""The help of every command: what is written for each option, and not too much at once."""

from dataclasses import fields

import pytest

from linattn.lab.command import flag, load, main
from linattn.lab.commands import COMMANDS
from linattn.support.config import option_of

MOST = 25  # options on the first page


def words(text):
    """Without borders, paddings and ends of lines; a word that is broken at a hyphen is whole again."""
    return "".join(part for part in text.split() if part != "│")


def help_of(capsys, name, option="--help"):
    assert main([*name.split(), option]) == 0
    return words(capsys.readouterr().out)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_is(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    first, everything = help_of(capsys, name), help_of(capsys, name, "--help-all")
    shown = [field for field in fields(load(name)) if not option_of(field).hidden]
    for field in shown:
        rule = option_of(field)
        assert rule.help, f"{field.name} says nothing"
        assert words(rule.help) in everything, field.name
        assert (words(rule.help) in first) or rule.rare, field.name
        if not rule.argument:
            assert flag(field.name) in everything
    if "task" not in {field.name for field in shown}:  # settings of tasks and language models are many
        assert sum(not option_of(field).rare for field in shown) <= MOST


def test_all_commands_are_listed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name.split()[0] in shown for name in COMMANDS)
