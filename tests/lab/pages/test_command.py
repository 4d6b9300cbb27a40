"""``linattn report`` and what happens without matplotlib."""

import importlib.util

import pytest
import typer
from typer.testing import CliRunner

from lab.pages.fixtures import make_results, write_folder
from linattn.lab.cli.report import report
from linattn.lab.pages import write_csv, write_report
from linattn.support.extras import MissingExtraError


def invoke(folder):
    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, [str(folder)])


@pytest.fixture
def without_matplotlib(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("linattn.support.extras.find_spec", lambda name: None if name == "matplotlib" else find(name))


def test_the_command_writes_page_and_charts(tmp_path):
    result = invoke(write_folder(tmp_path))
    assert result.exit_code == 0, result.output
    assert "report.html" in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "examples.json", "report.html", "charts"}


def test_a_folder_without_results_is_a_bad_argument(tmp_path):
    result = invoke(tmp_path)
    assert result.exit_code == 2
    assert "results.json" in result.output
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_pip_line_is_named_and_csv_still_works(tmp_path, without_matplotlib):
    write_folder(tmp_path)
    with pytest.raises(
        MissingExtraError, match=r"the report's charts needs matplotlib: pip install 'linattn\[report\]'"
    ):
        write_report(tmp_path)
    result = invoke(tmp_path)
    assert result.exit_code == 2
    assert "pip install" in result.output
    assert not (tmp_path / "report.html").exists()
    assert all(path.is_file() for path in write_csv(make_results(), tmp_path / "results.csv"))
