"""When steps are recorded: what was asked for, what speaks against it, and the command line."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

from linattn.lab.train.captured_step import graphs_wanted
from linattn.lab.train.config import TrainConfig
from linattn.lab.train.text.config import TextConfig
from linattn.support.options import OptionError


@pytest.mark.parametrize(
    ("processes", "accumulation", "reason"), [(2, 1, "2 processes"), (1, 4, "in 4 parts"), (1, 1, None)]
)
def test_what_speaks_against_graphs_is_told(processes, accumulation, reason, recwarn):
    gpu = SimpleNamespace(device=torch.device("cuda"), num_processes=processes)
    for graphs in (None, True):
        config = SimpleNamespace(graphs=graphs, accumulation=accumulation)
        assert graphs_wanted(config, gpu) == (reason is None)
    assert all(reason in str(w.message) for w in recwarn)
    assert bool(len(recwarn)) == (reason is not None)
    recwarn.clear()
    assert not graphs_wanted(SimpleNamespace(graphs=False, accumulation=accumulation), gpu)
    cpu = SimpleNamespace(device=torch.device("cpu"), num_processes=processes)
    assert not graphs_wanted(SimpleNamespace(graphs=None, accumulation=accumulation), cpu)
    assert len(recwarn) == 0, "what was not asked for needs no reason"


@pytest.mark.parametrize("config", [TrainConfig(), TextConfig()])
def test_graphs_are_an_option_of_gpus(config):
    replace(config, graphs=False).check()
    with pytest.raises(OptionError, match=r"graphs: CUDA graphs need a GPU, and device is cpu"):
        replace(config, graphs=True).check()
    with pytest.raises(OptionError, match=r"graphs: must be True, False or None, got 1"):
        replace(config, graphs=1).check()


@pytest.mark.parametrize(("command", "arguments"), [("train", []), ("train", ["task", "mqar"]), ("compare", [])])
def test_the_command_line_has_it(command, arguments, tmp_path):
    from linattn.lab.cli import compare, train

    app = typer.Typer()
    app.add_typer({"train": train, "compare": compare}[command].app, name=command)
    given = [command, *arguments, "--graphs", "--device", "cpu", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, given, env={"COLUMNS": "160", "TERM": "dumb"})
    assert result.exit_code == 2, result.output
    assert "--graphs" in result.output
    assert "need a GPU" in result.output
