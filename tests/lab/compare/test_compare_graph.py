"""Comparisons of graph models and of their recipes, and the cost of growing graphs."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from linattn.lab.compare.graph import CompareGraphs
from linattn.lab.compare.graph_scaling import GraphScaling
from linattn.lab.experiment import load_results
from linattn.lab.screen import Screen
from linattn.lab.tasks.graph.files import load_graph
from linattn.lab.tasks.graph.search import search_signature
from linattn.lab.train import graph as loop
from linattn.lab.train.graph_recipes import graph_recipe
from linattn.models.graph import graph_model_options, graph_models
from linattn.support.options import OptionError

ROOT = Path(__file__).parents[3]
COMMON = {"data": "communities:120:3", "epochs": 6, "device": "cpu"}


def run(output, **options):
    """The rows of a comparison by their kind, and its meta."""
    assert CompareGraphs(**COMMON | options, output=output).run(Screen(quiet=True)) == 0
    results = load_results(output / "results.json")
    kinds = {kind: [row for row in results["rows"] if row["kind"] == kind] for kind in ("sweep", "run", "cost")}
    return kinds, results["meta"]


def named(data, **options) -> CompareGraphs:
    """A comparison on small data that goes by the name of larger ones, whose recipes it gets."""
    config = CompareGraphs(data=data, **options)
    config.__dict__["graph"] = replace(load_graph("communities:60:3"), name=data)
    return config


def test_a_grid_is_the_same_for_all_and_validation_chooses(tmp_path):
    """A weight decay that wipes out all weights is tried by every model and taken by none; the page shows it all."""
    models = ("sgc", "pseudo_riemannian")
    grid = {"lr": (0.02, 0.05), "weight_decay": (1e-4, 1e6), "dropout": (0.0, 0.3)}
    kinds, meta = run(tmp_path, models=models, seeds=2, **grid)
    assert [(row["mechanism"], row["seed"]) for row in kinds["run"]] == [(name, s) for s in (0, 1) for name in models]
    for name in models:
        tried = {tuple(row[key] for key in grid): row["score"] for row in kinds["sweep"] if row["mechanism"] == name}
        assert set(tried) == {(lr, w, d) for lr in grid["lr"] for w in grid["weight_decay"] for d in grid["dropout"]}
        (taken,) = {tuple(row[key] for key in grid) for row in kinds["run"] if row["mechanism"] == name}
        assert tried[taken] == max(tried.values())
        assert taken[1] == 1e-4
    assert not any("scores" in row for row in kinds["sweep"])  # test data has no part in the choice
    assert all(row["scores"]["accuracy"] == row["score"] for row in kinds["run"])
    assert all(row["parameters"] > 0 and row["peak_bytes_train"] > 0 for row in kinds["cost"])
    assert meta["data"] == {"name": "communities-120-3", "task": "nodes", "nodes": 120, "features": 16, "classes": 3,
                            "edges": meta["data"]["edges"]}  # fmt: skip
    page = (tmp_path / "report.html").read_text()
    assert page.count("1e+06") >= 8  # of 2 models, 2 rates and 2 dropouts
    assert "input_map=normalized" in page


def test_the_space_is_searched_where_nobody_names_it():
    config = CompareGraphs(**COMMON, models=("pseudo_riemannian",))
    found = search_signature(load_graph(COMMON["data"]), dimension=64)[:2]
    assert config.options("pseudo_riemannian")["options"]["signature"] == found
    assert config.model("pseudo_riemannian", 3, {}).signature == found
    smaller = CompareGraphs(**COMMON, models=("pseudo_riemannian",), hidden=7)
    assert smaller.model("pseudo_riemannian", 3, {}).signature == (4, 3)


def test_a_grid_may_grow_and_finished_runs_are_kept(tmp_path, monkeypatch):
    """The new point is better at the same learning rate, so the final run is another; nothing else is trained again."""
    trained, original = [], loop.train_graph
    monkeypatch.setattr("linattn.lab.compare.graph.train_graph", lambda *a, **k: trained.append(1) or original(*a, **k))
    options = {"lr": (0.05,), "dropout": (0.3,), "seeds": 1}
    run(tmp_path, models=("sgc",), weight_decay=(1e6, 1e5), **options)
    assert len(trained) == 3
    kinds, _ = run(tmp_path, models=("gcn", "sgc"), weight_decay=(1e6, 1e5, 1e-4), **options)
    assert len(trained) == 3 + 4 + 2  # all of gcn, and of sgc the point and the final run
    assert [row["weight_decay"] for row in kinds["run"]] == [1e-4, 1e-4]


def test_a_point_without_a_finite_loss_is_passed_over_and_any_other_error_fails(tmp_path, monkeypatch):
    original = loop.train_graph

    def train(create, objective, config, *args, **more):
        if config.weight_decay == 1.0:
            raise error
        return original(create, objective, config, *args, **more)

    monkeypatch.setattr("linattn.lab.compare.graph.train_graph", train)
    error = loop.NotFiniteError("lost")
    kinds, _ = run(tmp_path / "a", models=("sgc",), seeds=1, weight_decay=(1.0, 0.0), task="links")
    assert [row["weight_decay"] for row in kinds["run"]] == [0.0]
    assert kinds["run"][0]["scores"].keys() == {"auc", "average_precision"}
    error = RuntimeError("out of memory")
    config = CompareGraphs(**COMMON, models=("sgc",), seeds=1, weight_decay=(1.0, 0.0), output=tmp_path / "b")
    assert config.run(Screen(quiet=True)) == 1
    assert "out of memory" in (tmp_path / "b" / "results.json").read_text()


def test_the_dropout_of_a_grid_reaches_every_model():
    """The same weights and the same draws, with two rates: a model that gave the same would have half a grid."""
    config = CompareGraphs(data="communities:60:3", models=tuple(graph_models()))
    objective = config.objective(config.training("sgc", 0, {}))
    for name in graph_models():
        found = []
        for rate in (0.3, 0.8):
            torch.manual_seed(0)
            model = config.model(name, objective.outputs, {"dropout": rate}).train()
            torch.manual_seed(1)
            found.append(model(objective.graph))
        assert not torch.allclose(*found), name


@pytest.mark.parametrize(
    ("option", "words", "given"),
    [
        ("models", "must be one of", {"models": ("nothing",)}),
        ("models", "gcn takes no mechanism", {"models": ("gcn+relu",)}),
        ("models", "euclidean: ", {"models": ("euclidean",), "hidden": 7, "option": {"num_heads": 2}}),
        ("option", "it takes hops", {"models": ("sgc",), "option": {"sgc.nothing": 1}}),
        ("option", "gcn is not compared", {"models": ("sgc",), "option": {"gcn.dropout": 0.1}}),
        ("data", "use --task links", {"data": "grid:4:4", "models": ("sgc",)}),
        ("data", "does not exist", {"data": "nowhere"}),
        ("dropout", "below 1", {"dropout": (0.5, 1.0)}),
        ("weight_decay", "at least 0", {"weight_decay": (-1.0,)}),
        ("paper", "links of tree-4-6; got sgc", {"paper": True, "models": ("sgc",)}),
    ],
)
def test_wrong_options_are_named_before_any_work(option, words, given, tmp_path):
    with pytest.raises(OptionError, match=words) as raised:
        CompareGraphs(**COMMON | given, output=tmp_path / "out").run(Screen(quiet=True))
    assert raised.value.option == option
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("data", ["Cora", "Citeseer", "PubMed"])
@pytest.mark.parametrize("task", ["nodes", "links"])
def test_the_recorded_rows_are_what_the_recipes_give(task, data):
    """Width, options and training of every row of the tables on docs/graph.md: their commands mean the same still."""
    written = json.loads((ROOT / "results" / "h200" / f"graph-{task}-{data.lower()}.json").read_text())
    assert "--paper" not in written["meta"]["command"]
    rows = {row["mechanism"]: row for row in written["rows"] if row["kind"] == "cost"}
    assert len(rows) == 8
    config = named(data, task=task, models=tuple(rows), epochs=written["meta"]["train"]["epochs"])
    for name, row in rows.items():
        point = {key: row["chosen"][key] for key in ("weight_decay", "dropout")}
        recorded = {key: row[key] for key in ("hidden", "options", "train")}
        recorded["train"] = {key: value for key, value in recorded["train"].items() if key != "device"}
        assert json.loads(json.dumps(config.settings_at(name, point))) == recorded, name


SCRIPTS = {
    ("nodes", "Cora"): ((14, 2), 3, 3, 0.005, 0.1, 0.05, (0.2, 0.2), (0.0, 0.0)),
    ("nodes", "Citeseer"): ((8, 8), 3, 2, 0.002, 0.1, 0.05, (0.2, 0.2), (0.0, 0.0)),
    ("nodes", "PubMed"): ((14, 2), 2, 4, 0.01, 0.1, 0.05, (0.3, 0.0), (0.4, 0.0)),
    ("links", "Cora"): ((14, 2), 1, 1, 0.005, 1e-3, 5e-3, (0.2, 0.2), (0.0, 0.0)),
    ("links", "Citeseer"): ((8, 8), 2, 2, 0.005, 1e-3, 5e-3, (0.2, 0.2), (0.0, 0.0)),
    ("links", "PubMed"): ((14, 2), 1, 1, 0.005, 1e-3, 5e-3, (0.2, 0.2), (0.0, 0.0)),
    ("links", "tree-4-6"): ((0, 16), 1, 1, 0.01, 1e-3, 5e-3, (0.0, 0.0), (0.0, 0.0)),
}


@pytest.mark.parametrize(("task", "data"), SCRIPTS)
def test_the_paper_is_what_its_scripts_have(task, data):
    """Time and space, blocks of attention and convolutions, rate, decays of branches and rest, dropout of both."""
    recipe = graph_recipe("pseudo_riemannian", task, data, paper=True)
    options, train = graph_model_options("pseudo_riemannian") | dict(recipe.options), recipe.train
    assert train["attention_weight_decay"] == train["graph_weight_decay"]
    shape = tuple(options[name] for name in ("signature", "num_layers", "graph_layers"))
    rates = tuple(train[name] for name in ("lr", "graph_weight_decay", "weight_decay"))
    assert (*shape, *rates, options["dropout"], options["graph_dropout"]) == SCRIPTS[task, data]
    assert (options["input_map"], options["input_norm"], options["input_dropout"]) == ("neighbours", False, 0.0)
    assert (options["activation"], options["merge"], options["num_heads"]) == ("tanh", "exponential", 1)
    assert options["graph_weight"] == (0.9 if data == "tree-4-6" else 0.8)
    assert options["norm"] == ((task, data) != ("nodes", "Citeseer"))
    assert options["residual"] == (None if (task, data) == ("nodes", "PubMed") else "transport")
    assert (recipe.hidden, train["epochs"], train["row_normalize"]) == (16, 1000, False)


def test_the_paper_reaches_its_model_alone_and_epochs_give_way_to_those_of_the_user():
    config = named("Cora", models=("sgc", "pseudo_riemannian+relu"), paper=True)
    config.check_hosts()
    assert [config.training(name, 0, {}).epochs for name in config.models] == [300, 1000]
    config = named("Cora", models=("sgc", "pseudo_riemannian"), paper=True, epochs=7)
    assert [config.training(name, 0, {}).epochs for name in config.models] == [7, 7]
    with pytest.raises(OptionError, match="got sgc, gcn on nodes of Cora"):
        named("Cora", models=("sgc", "gcn"), paper=True).check_hosts()


def test_the_options_of_hypformer_on_the_page_on_graphs_reach_the_model():
    page = (ROOT / "docs" / "graph.md").read_text()
    given = [found.strip('"') for found in re.findall(r"`--option (\"?hypformer\.[^`]*)`", page)]
    assert len(given) == 3
    config = CompareGraphs.parse({"data": "communities:60:3", "models": "hypformer", "option": given})
    model = config.model("hypformer", 3, {})
    assert model.blocks[0].attention.parts["space"].mechanism.power == 1
    assert model.input.encoding is not None
    assert isinstance(model.input.norm, torch.nn.Identity)


def test_scaling_measures_and_checks_every_size(tmp_path, capsys):
    config = GraphScaling(nodes=(800, 200), models=("gcn", "sgformer"), repeats=1, device="cpu", output=tmp_path)
    assert config.run(Screen()) == 0
    assert "gcn: time grows as nodes^" in capsys.readouterr().out
    rows = load_results(tmp_path / "results.json")["rows"]
    assert [(row["model"], row["nodes"], row["status"]) for row in rows] == [
        (name, nodes, "ok") for name in ("gcn", "sgformer") for nodes in (200, 800)
    ]
    assert all(0 < row["error_of_logits"] < 1e-4 and row["median_ms"] > 0 for row in rows)
    ratios = [rows[i + 1]["peak_bytes"] / rows[i]["peak_bytes"] for i in (0, 2)]
    assert all(3.0 < ratio < 4.6 for ratio in ratios), ratios  # of four times the nodes, with fewer repeated edges
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") >= 2
    assert "mathdefault" not in page  # no TeX on an axis
    assert all(f"{row['median_ms']:.4g}" in page for row in rows)


def test_wrong_logits_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr("linattn.lab.compare.graph_scaling.logits_error", lambda model, data: 0.5)
    config = GraphScaling(models=("sgc",), nodes=(20,), repeats=1, device="cpu", output=tmp_path)
    assert config.run(Screen(quiet=True)) == 1
    assert load_results(tmp_path / "results.json")["rows"][0]["status"] == "WRONG"


def test_growth_is_that_of_large_graphs():
    """What a call costs anyway, here 10 ms, hides the growth at small sizes."""
    rows = [
        {"model": "gcn", "nodes": nodes, "median_ms": max(10, nodes / 1000), "peak_bytes": 2048 * nodes}
        for nodes in (1_000, 100_000, 1_000_000)
    ]
    said = GraphScaling(device="cpu").sentences(rows)
    assert said == ["gcn: time grows as nodes^1.00 from 100,000 to 1,000,000; 2.0 KiB a node."]
