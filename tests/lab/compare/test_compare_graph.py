"""A comparison of graph models from the command line to its files, and the cost of growing graphs."""

import csv
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from linattn.lab.cli.main import app
from linattn.lab.compare.graph.scaling import ScalingConfig, ScalingResult, ScalingRow, measure_scaling

COMMON = ("--data", "communities:120:3", "--epochs", "6", "--device", "cpu")


def graph(*arguments):
    return CliRunner().invoke(app, ["graph", *map(str, arguments)], env={"COLUMNS": "160", "TERM": "dumb"})


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Two learning rates, of which validation chooses one for each model."""
    folder = tmp_path_factory.mktemp("graph")
    models = "sgc,euclidean+relu,pseudo_riemannian"
    found = graph("compare", *COMMON, "--models", models, "--lr", "1e-9,0.05", "--seeds", 2, "--output", folder)
    assert found.exit_code == 0, found.output
    return folder, found.output, json.loads((folder / "results.json").read_text())


def test_results_have_every_run_and_its_spread(compared):
    folder, output, results = compared
    assert [(row["mechanism"], row["seed"]) for row in results["rows"]] == [
        (name, seed) for seed in (0, 1) for name in ("sgc", "euclidean+relu", "pseudo_riemannian")
    ]
    for model in results["mechanisms"]:
        scores = [row["score"] for row in results["rows"] if row["mechanism"] == model["mechanism"]]
        assert model["score_mean"] == pytest.approx(sum(scores) / 2)
        best = max(model["sweep"], key=lambda run: (run["score"], -run["lr"]))
        assert model["lr"] == best["lr"]
        assert f"{model['score_mean']:.2f} ± {model['score_std']:.2f}" in output
    assert results["meta"]["data"] == {
        "name": "communities-120-3", "task": "nodes", "nodes": 120, "edges": results["meta"]["data"]["edges"],
        "features": 16, "classes": 3,
    }  # fmt: skip
    lines = list(csv.DictReader((folder / "results.csv").open()))
    assert [line["mechanism"] for line in lines] == ["sgc", "euclidean+relu", "pseudo_riemannian"]
    assert float(lines[0]["score_mean"]) == results["mechanisms"][0]["score_mean"]


def test_the_page_is_drawn_again_from_the_results(compared):
    folder = compared[0]
    page, charts = folder / "report.html", sorted(folder.glob("charts/*.png"))
    before = {path: path.read_bytes() for path in (page, *charts)}
    assert b"Graph models compared on communities-120-3" in before[page]
    assert [path.name for path in charts] == ["learning.png", "scores.png"]
    for path in before:
        path.unlink()
    found = CliRunner().invoke(app, ["report", str(folder)])
    assert found.exit_code == 0, found.output
    assert {path: path.read_bytes() for path in (page, *sorted(folder.glob("charts/*.png")))} == before


def test_the_space_is_searched_where_nobody_names_it(compared):
    q, p = compared[2]["mechanisms"][2]["options"]["signature"]
    assert q + p == 64
    shown = graph("search", "communities:120:3", "--dimension", 64).output
    assert f"(q, p) = ({q}, {p})" in shown


def test_a_second_call_trains_nothing_and_other_settings_are_refused(compared):
    folder, _, results = compared
    logs = {path: path.stat().st_mtime_ns for path in folder.rglob("log.jsonl")}
    assert len(logs) == 3 * 2 + 3 * 2
    again = graph("compare", *COMMON, "--models", "sgc,gcn", "--lr", "1e-9,0.05", "--seeds", 2, "--output", folder)
    assert again.exit_code == 0, again.output
    found = json.loads((folder / "results.json").read_text())["rows"]
    assert [row["score"] for row in found if row["mechanism"] == "sgc"] == [
        row["score"] for row in results["rows"] if row["mechanism"] == "sgc"
    ]
    assert all(path.stat().st_mtime_ns == time for path, time in logs.items())
    other = graph("compare", *COMMON, "--models", "sgc", "--lr", "0.05", "--output", folder)
    assert other.exit_code == 2
    assert "other settings" in other.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", *COMMON, "--models", "nothing"), "must be one of"),
        (("compare", *COMMON, "--models", "gcn+relu"), "gcn takes no mechanism"),
        (("compare", *COMMON, "--models", "sgc", "--option", "sgc.nothing=1"), "it takes hops"),
        (("compare", "--data", "grid:4:4", "--models", "sgc"), "use --task links"),
        (("search", "nowhere"), "does not exist"),
        (("search", "cycle:5", "--dimension", "7"), "must be even"),
        (("scaling", "--models", "nothing"), "must be one of"),
    ],
)
def test_wrong_options_are_named(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = graph(*arguments)
    assert found.exit_code == 2
    assert words in " ".join(found.output.replace("│", " ").split())


def test_scaling_measures_and_checks_every_size(tmp_path):
    found = graph("scaling", "--nodes", "200,800", "--models", "gcn,pseudo_riemannian", "--repeats", 1,
                  "--device", "cpu", "--output", tmp_path)  # fmt: skip
    assert found.exit_code == 0, found.output
    written = json.loads((tmp_path / "graph-scaling.json").read_text())
    rows = written["rows"]
    assert written["bytes_per_node"] == {row["model"]: row["peak_bytes"] / 800 for row in rows[2:]}
    assert [(row["model"], row["nodes"], row["status"]) for row in rows] == [
        (name, nodes, "ok") for nodes in (200, 800) for name in ("gcn", "pseudo_riemannian")
    ]
    assert all(0 < row["error"] < 1e-4 and row["median_ms"] > 0 for row in rows)
    ratios = [rows[i + 2]["peak_bytes"] / rows[i]["peak_bytes"] for i in (0, 1)]
    assert all(3.0 < ratio < 4.6 for ratio in ratios), ratios  # of four times the nodes, with fewer repeated edges
    assert Path(tmp_path / "graph-scaling.png").stat().st_size > 1000
    page = (tmp_path / "graph-scaling.html").read_text()
    assert page.count("<svg") >= 2
    assert "mathdefault" not in page  # no TeX on an axis
    assert all(f"{row['median_ms']:,.1f}" in page for row in rows)
    assert "gcn: time grows as nodes^" in found.output


def test_sizes_that_would_take_too_long_are_left_out():
    result = measure_scaling(ScalingConfig(("sgc",), (20, 40), repeats=1, max_seconds=0.0), lambda result: None)
    assert [row.status for row in result.rows] == ["ok", "left out"]
    assert result.rows[1].median_ms is None


def test_growth_is_that_of_large_graphs():
    """What a call costs anyway, here 10 ms, hides the growth at small sizes."""
    result = ScalingResult({})
    for nodes in (1_000, 100_000, 1_000_000, 10_000_000):
        gone = nodes > 1_000_000
        result.rows.append(ScalingRow("gcn", nodes, 8 * nodes, median_ms=None if gone else max(10, nodes / 1000),
                                      peak_bytes=None if gone else 2048 * nodes))  # fmt: skip
    assert result.growth("gcn") == pytest.approx(1)
    assert result.words("gcn") == "gcn: time grows as nodes^1.00 from 100,000 to 1,000,000; 2.0 KiB a node"


def test_compare_knows_graphs_under_its_own_name(tmp_path):
    arguments = ["compare", "graph", *COMMON, "--models", "sgc", "--seeds", "1", "--output", str(tmp_path)]
    found = CliRunner().invoke(app, arguments, env={"COLUMNS": "160", "TERM": "dumb"})
    assert found.exit_code == 0, found.output
    assert [row["mechanism"] for row in json.loads((tmp_path / "results.json").read_text())["rows"]] == ["sgc"]


def test_the_page_on_graphs_runs():
    page = (Path(__file__).parents[3] / "docs" / "graph.md").read_text()
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.S | re.M):
        exec(block, names)
    assert names["model"](names["graph"]).shape == (12, 3)
