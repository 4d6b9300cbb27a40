"""Cases are measured once, wherever they run, and what is lost is one case."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.lab.small import Small

from linattn.lab.cases import find, kept, revisions, run_cases
from linattn.lab.experiment import load_results
from linattn.lab.screen import Screen
from linattn.mechanisms import registry
from linattn.support.options import OptionError

ROOT = Path(__file__).parents[2]


def lines(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.mark.parametrize("options", [{"where": "here"}, {"jobs": 2}])
def test_each_case_is_measured_once_and_a_failure_costs_itself_alone(tmp_path, options):
    log = tmp_path / "log"
    cases = Small(numbers=(1, 13, 3), log=str(log)).cases()
    where = {"where": "processes", **options}
    first = run_cases(cases, Small.measure, tmp_path / "cases", **where)
    assert [outcome.result and outcome.result["square"] for outcome in first] == [1, None, 9]
    assert first[1].error == "ValueError: 13 brings bad luck"
    again = run_cases(cases, Small.measure, tmp_path / "cases", **where)
    assert again == first
    assert sorted(lines(log)) == [1, 3, 13, 13]  # only what failed is tried again


def test_a_process_that_dies_loses_its_case_alone(tmp_path):
    cases = Small(numbers=(66, 1, 2)).cases()
    outcomes = run_cases(cases, Small.measure, tmp_path, where="processes", jobs=1)
    assert [outcome.error for outcome in outcomes] == ["the process was ended by SIGKILL", "", ""]


@pytest.mark.parametrize("where", ["here", "processes"])
def test_a_wrong_option_ends_all(tmp_path, where):
    with pytest.raises(OptionError, match="99 is wrong"):
        run_cases(Small(numbers=(99, 1)).cases(), Small.measure, tmp_path, where=where)


def test_a_killed_run_goes_on_and_leaves_nothing(tmp_path):
    """Killed at several moments, with its workers: the same command gives the results of an unbroken run."""
    command = "from tests.lab.small import Small; from linattn.lab.screen import Screen; from pathlib import Path\n"
    command += "small = Small(numbers=tuple(range(8)), seconds=0.1, jobs=2, output=Path('{}'))\n"
    command += "if __name__ == '__main__': small.run(Screen(quiet=True))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}

    def start(folder: Path) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-c", command.format(folder)], env=env, start_new_session=True)

    assert start(tmp_path / "whole").wait(120) == 0
    broken = tmp_path / "broken"
    for wanted in (1, 4):
        process = start(broken)
        deadline = time.monotonic() + 60
        while len(list(broken.glob("cases/*.json"))) < wanted and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)  # its workers notice by themselves
        process.wait()
    (broken / "cases" / ".half-abcdefgh.json").write_text("{")
    assert start(broken).wait(120) == 0
    assert load_results(broken / "results.json")["rows"] == load_results(tmp_path / "whole" / "results.json")["rows"]
    assert not list(broken.rglob(".*"))
    children = subprocess.run(["pgrep", "-f", str(broken)], capture_output=True, text=True).stdout.split()
    assert not children


def test_results_of_a_mechanism_that_changed_are_not_taken_up(tmp_path, monkeypatch):
    case = {"mechanism": "relu", "more": [{"name": "nala"}]}
    assert revisions(case) == {"relu": 1, "nala": 1}
    assert kept(tmp_path, case, lambda: {"score": 1.0}) == {"score": 1.0}
    info = registry.mechanism_info("relu")
    monkeypatch.setitem(registry._REGISTRY, "relu", type(info)(**{**vars(info), "revision": 2}))
    assert find(tmp_path, case) is None


def test_the_command_writes_one_line_a_row_and_a_page(tmp_path, capsys):
    small = Small(numbers=(2, 13), output=tmp_path, jobs=1)
    assert small.run(Screen(as_json=True)) == 1
    printed = json.loads(capsys.readouterr().out)
    assert [row.get("square") for row in printed["rows"]] == [4, None]
    text = (tmp_path / "results.json").read_text()
    assert len(text.splitlines()) == len(printed["rows"]) + 3
    assert load_results(tmp_path / "results.json")["rows"] == printed["rows"]
    page = (tmp_path / "report.html").read_text()
    assert "What &lt;came&gt; out." in page
    assert "<svg" in page
    assert (tmp_path / "squares.png").stat().st_size > 1000
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
