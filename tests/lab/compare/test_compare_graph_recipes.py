"""Recipes of graph models: those of the tables, those of the paper, and grids of them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.lab.compare.test_compare_graph import COMMON, graph

from linattn.lab.compare.cells import Cell
from linattn.lab.compare.graph.grid import Grid
from linattn.lab.compare.graph.settings import GraphCompareConfig, Point
from linattn.lab.compare.graph.subject import Graphs
from linattn.lab.tasks.graph import load_graph
from linattn.lab.train.graph.epochs import NotFiniteError
from linattn.lab.train.graph.loop import GraphResult
from linattn.lab.train.graph.objective import create_objective
from linattn.lab.train.graph.recipes import DEFAULTS, graph_recipe
from linattn.models.graph import create_graph_model, graph_model_options, graph_models
from linattn.support.options import OptionError

RECORDED = Path(__file__).parents[3] / "results" / "h200"


def test_without_a_rate_each_model_takes_that_of_its_recipe(tmp_path):
    found = graph("compare", *COMMON, "--models", "sgc,gcn", "--seeds", 1, "--output", tmp_path)
    assert found.exit_code == 0, found.output
    rates = {row["mechanism"]: row["lr"] for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert rates == {name: graph_recipe(name, "nodes", "communities-120-3").train["lr"] for name in ("sgc", "gcn")}
    assert rates["sgc"] != rates["gcn"]


def test_every_model_has_a_recipe():
    assert set(graph_models()) == set(DEFAULTS)
    paper, own = (graph_recipe("pseudo_riemannian", "nodes", "Cora", paper=which) for which in (True, False))
    assert (paper.hidden, paper.options["signature"]) == (16, (14, 2))
    assert sum(own.options["signature"]) == own.hidden
    assert all(graph_recipe(name, "links", "x").train["row_normalize"] == "unit" for name in graph_models())


@pytest.mark.parametrize("data", ["Cora", "Citeseer", "PubMed"])
@pytest.mark.parametrize("task", ["nodes", "links"])
def test_the_recorded_rows_are_what_the_recipes_give(task, data):
    """Width, options and training of every row of the tables on docs/graph.md: their commands mean the same still."""
    written = json.loads((RECORDED / f"graph-{task}-{data.lower()}.json").read_text())
    meta = written["meta"]
    assert "--paper" not in meta["command"]
    names = tuple(row["mechanism"] for row in written["mechanisms"])
    config = GraphCompareConfig(data, names, task, changes={"epochs": meta["train"]["epochs"]})
    subject = Graphs(config, replace(load_graph("communities:60:3"), name=data))
    assert len(names) == 8
    for row in written["mechanisms"]:
        subject.chosen[row["mechanism"]] = Point(row["chosen"]["weight_decay"], row["chosen"]["dropout"])
        found = subject.details(row["mechanism"])
        for part in ("hidden", "options", "train"):
            recorded = {k: v for k, v in row[part].items() if k != "device"} if part == "train" else row[part]
            assert json.loads(json.dumps(found[part])) == recorded, (row["mechanism"], part)


def test_the_paper_is_what_its_scripts_have():
    """Time and space, blocks of attention and convolutions, rate, decays of branches and rest, dropout of both."""
    scripts = {
        ("nodes", "Cora"): ((14, 2), 3, 3, 0.005, 0.1, 0.05, (0.2, 0.2), (0.0, 0.0)),
        ("nodes", "Citeseer"): ((8, 8), 3, 2, 0.002, 0.1, 0.05, (0.2, 0.2), (0.0, 0.0)),
        ("nodes", "PubMed"): ((14, 2), 2, 4, 0.01, 0.1, 0.05, (0.3, 0.0), (0.4, 0.0)),
        ("links", "Cora"): ((14, 2), 1, 1, 0.005, 1e-3, 5e-3, (0.2, 0.2), (0.0, 0.0)),
        ("links", "Citeseer"): ((8, 8), 2, 2, 0.005, 1e-3, 5e-3, (0.2, 0.2), (0.0, 0.0)),
        ("links", "PubMed"): ((14, 2), 1, 1, 0.005, 1e-3, 5e-3, (0.2, 0.2), (0.0, 0.0)),
        ("links", "tree-4-6"): ((0, 16), 1, 1, 0.01, 1e-3, 5e-3, (0.0, 0.0), (0.0, 0.0)),
    }
    defaults = graph_model_options("pseudo_riemannian")
    for (task, data), wanted in scripts.items():
        recipe = graph_recipe("pseudo_riemannian", task, data, paper=True)
        options, train = defaults | dict(recipe.options), recipe.train
        assert train["attention_weight_decay"] == train["graph_weight_decay"]
        shape = tuple(options[name] for name in ("signature", "num_layers", "graph_layers"))
        rates = tuple(train[name] for name in ("lr", "graph_weight_decay", "weight_decay"))
        found = (*shape, *rates, options["dropout"], options["graph_dropout"])
        assert found == wanted, (task, data)
        assert (options["input_map"], options["input_norm"], options["input_dropout"]) == ("neighbours", False, 0.0)
        assert (options["activation"], options["merge"], options["num_heads"]) == ("tanh", "exponential", 1)
        assert options["graph_weight"] == (0.9 if data == "tree-4-6" else 0.8)
        assert options["norm"] == ((task, data) != ("nodes", "Citeseer"))
        assert options["residual"] == (None if (task, data) == ("nodes", "PubMed") else "transport")
        assert (recipe.hidden, train["epochs"], train["row_normalize"]) == (16, 1000, False)


def test_epochs_of_a_paper_give_way_to_those_of_the_user(tmp_path):
    subject = Graphs(
        GraphCompareConfig("Cora", ("sgc", "pseudo_riemannian"), paper=True, output=tmp_path),
        replace(load_graph("communities:60:3"), name="Cora"),
    )
    assert [subject.config.train_of(name, "Cora", 0).epochs for name in subject.config.models] == [300, 1000]
    assert subject.rounds == 1000
    config = replace(subject.config, changes={"epochs": 7})
    assert [config.train_of(name, "Cora", 0).epochs for name in config.models] == [7, 7]


def test_a_paper_without_scripts_for_the_data_is_told_before_any_work(tmp_path):
    arguments = ["--data", "communities:60:3", "--models", "sgc,pseudo_riemannian", "--paper", "--output", tmp_path]
    found = graph("compare", *arguments)
    assert found.exit_code == 2
    assert "--paper" in found.output
    words = " ".join(found.output.replace("│", "").split())
    assert "pseudo_riemannian on links of cora, citeseer, pubmed, tree-4-6; got sgc" in words
    assert not (tmp_path / "settings.json").exists()
    cora = replace(load_graph("communities:60:3"), name="Cora")
    with pytest.raises(OptionError, match="got sgc, gcn on nodes of Cora"):
        Graphs(GraphCompareConfig("Cora", ("sgc", "gcn"), paper=True), cora)
    assert Graphs(GraphCompareConfig("Cora", ("pseudo_riemannian+relu",), paper=True), cora).rounds == 1000


def test_the_options_of_hypformer_on_the_page_on_graphs_reach_the_model(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "graph.md").read_text()
    named = [found.strip('"') for found in re.findall(r"`--option (\"?hypformer\.[^`]*)`", page)]
    assert len(named) == 3
    given = [part for option in named for part in ("--option", option)]
    found = graph("compare", "--data", "communities:60:3", "--epochs", 1, "--device", "cpu", "--models", "hypformer",
                  "--seeds", 1, "--output", tmp_path, *given)  # fmt: skip
    assert found.exit_code == 0, found.output
    options = json.loads((tmp_path / "results.json").read_text())["mechanisms"][0]["options"]
    assert options["mechanism_options"] == {"power": 1}
    model = create_graph_model("hypformer", in_channels=4, hidden=8, out_channels=3, **options)
    assert model.blocks[0].attention.parts["space"].mechanism.power == 1
    assert model.input.encoding is not None
    assert isinstance(model.input.norm, torch.nn.Identity)


def test_a_grid_is_the_same_for_all_and_validation_chooses(tmp_path):
    """A weight decay that wipes out all weights is tried by every model and taken by none; the page shows it all."""
    found = graph("compare", *COMMON, "--models", "sgc,pseudo_riemannian", "--seeds", 1, "--lr", "0.02,0.05",
                  "--weight-decay", "1e-4,1e6", "--dropout", "0,0.3", "--output", tmp_path)  # fmt: skip
    assert found.exit_code == 0, found.output
    results = json.loads((tmp_path / "results.json").read_text())
    wanted = {(lr, w, d) for lr in (0.02, 0.05) for w in (1e-4, 1e6) for d in (0.0, 0.3)}
    for model in results["mechanisms"]:
        tried = {(t["lr"], t["weight_decay"], t["dropout"]): t["val"] for t in model["grid"]}
        assert set(tried) == wanted
        rate = "dropout" if model["mechanism"] == "sgc" else "input_dropout"
        taken = model["lr"], model["train"]["weight_decay"], model["options"][rate]
        assert tried[taken] == max(tried.values())
        assert taken[1] == 1e-4
        assert model["train"]["graph_weight_decay"] == 1e-4
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") >= 2
    assert "mathdefault" not in page  # no TeX on an axis
    assert f"{results['mechanisms'][0]['score_mean']:.2f}" in page
    assert page.count("1e+06") == 8  # of 2 models, 2 rates and 2 dropouts


def test_the_dropout_of_a_grid_reaches_every_model():
    """The same weights and the same draws, with two rates: a model that gave the same would have half a grid."""
    data, names = load_graph("communities:60:3"), tuple(graph_models())
    subject = Graphs(GraphCompareConfig("communities:60:3", names), data)
    objective = create_objective(data, subject.config.train_of(names[0], data.name, 0))
    for name in names:
        found = []
        for rate in (0.3, 0.8):
            torch.manual_seed(0)
            model = subject.create(name, objective.outputs, Point(dropout=rate)).train()
            torch.manual_seed(1)
            found.append(model(objective.graph))
        assert not torch.allclose(*found), name


def test_a_grid_may_grow_and_finished_points_are_kept(tmp_path):
    """The new point is better at the same learning rate, so the final run is another; nothing else is trained again."""

    def compared(folder, decays):
        found = graph("compare", *COMMON, "--models", "sgc", "--seeds", 1, "--lr", "0.05", "--dropout", "0.3",
                      "--weight-decay", decays, "--output", folder)  # fmt: skip
        assert found.exit_code == 0, found.output
        model = json.loads((folder / "results.json").read_text())["mechanisms"][0]
        return model, [{**tried, "seconds": None} for tried in model["grid"]]

    first, first_grid = compared(tmp_path / "grown", "1e6,1e5")
    logs = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("log.jsonl")}
    grown, grown_grid = compared(tmp_path / "grown", "1e6,1e5,1e-4")
    assert all(path.stat().st_mtime_ns == time for path, time in logs.items())
    assert len(list(tmp_path.rglob("log.jsonl"))) == len(logs) + 2  # the point, and the final run
    assert all(tried in grown_grid for tried in first_grid)
    assert (first["train"]["weight_decay"], grown["train"]["weight_decay"]) == (1e6, 1e-4)
    at_once, at_once_grid = compared(tmp_path / "at_once", "1e6,1e5,1e-4")
    assert grown_grid == at_once_grid
    assert grown["score_mean"] == at_once["score_mean"]


def test_a_point_without_a_finite_loss_is_passed_over_and_any_other_error_is_told(tmp_path):
    config = GraphCompareConfig(
        "communities:120:3", ("sgc",), seeds=1, weight_decays=(0.0, 1.0), dropouts=(0.0,), output=tmp_path
    )

    def fail(error):
        def train(cell, point, folder):
            if point.weight_decay:
                raise error
            return GraphResult(0, 61.0, 60.0, {}, 1.0, 1)

        return train

    best = Grid(config, fail(NotFiniteError("lost"))).best(Cell("sgc", 0, 0.1))
    assert (best.weight_decay, best.val) == (0.0, 61.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        Grid(config, fail(RuntimeError("out of memory"))).best(Cell("sgc", 0, 0.1))
