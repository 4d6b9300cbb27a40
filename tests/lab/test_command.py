"""The command line that is made of configs."""

import pytest
from tests.lab import small

from linattn.lab.command import command_name, main
from linattn.lab.commands import Entry


@pytest.fixture(autouse=True)
def only_small(monkeypatch):
    entry = Entry(f"{small.__name__}:Small", "Square numbers.", "Things to try.")
    monkeypatch.setattr("linattn.lab.command.COMMANDS", {"small": entry, "try small": entry})


def test_the_longest_name_is_the_command():
    assert command_name(["try", "small", "--numbers", "1"]) == "try small"
    assert command_name(["small", "--help"]) == "small"
    assert command_name(["--help"]) == ""


def test_options_of_the_command_line_win_over_those_of_a_file(tmp_path, capsys):
    file = tmp_path / "options.toml"
    file.write_text('numbers = [4, 5]\nmechanism = "nala"\n')
    where = ["--output", str(tmp_path / "out"), "--jobs", "1"]
    assert main(["small", "--config", str(file), "--numbers", "6", "--json", *where]) == 0
    printed = capsys.readouterr().out
    assert '"square": 36' in printed
    assert '"mechanism": "nala"' in printed
    file.write_text("numbers = [")
    assert main(["small", "--config", str(file), *where]) == 2
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["small", "--numbers", "-1"], "--numbers: must be at least 0, got -1"),
        (["small", "--numbers", "a"], "--numbers: must be an integer, got 'a'"),
        (["small", "--number", "1"], "no option --number"),
        (["smal"], "smal"),
        (["small", "--device", "tpu"], "--device: must be one of cpu, cuda"),
        (["small", "--numbers", "99", "--jobs", "1", "--output", "{}"], "--numbers: 99 is wrong for all"),
    ],
)
def test_a_wrong_command_line_ends_with_what_is_wrong(words, said, capsys, tmp_path):
    assert main([word.format(tmp_path) for word in words]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert "Traceback" not in found


def test_help_shows_panels_and_keeps_rare_options_for_later(capsys):
    assert main(["small", "--help"]) == 0
    first = capsys.readouterr().out
    assert main(["try", "small", "--help-all"]) == 0
    whole = capsys.readouterr().out
    assert "Numbers to square" in first
    assert "[default: 1,2,3]" in first
    assert "--mechanism" not in first
    assert "--mechanism" in whole
    assert main([]) == 0
    assert "Things to try" in capsys.readouterr().out
