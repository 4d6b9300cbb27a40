"""The subject of comparisons on a graph: models with their recipes, tested at the epoch that validation chose."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from linattn.lab.bench.memory import peak_bytes
from linattn.lab.compare.cells import Cell
from linattn.lab.compare.graph.grid import Grid, Tried
from linattn.lab.compare.graph.settings import DECAYS, GraphCompareConfig, Point
from linattn.lab.compare.subject import OnRecord, OnStep, Outcome, Subject, Trainer
from linattn.lab.page.numbers import counted
from linattn.lab.pages.metric import Metric
from linattn.lab.tasks.graph import GraphData, search_signature
from linattn.lab.train.graph.config import GraphConfig
from linattn.lab.train.graph.epochs import GraphRecord
from linattn.lab.train.graph.loop import GraphResult, train_graph
from linattn.lab.train.graph.objective import Objective, create_objective
from linattn.lab.train.graph.recipes import check_paper
from linattn.models.graph import GraphModel, create_graph_model, graph_model_options
from linattn.support.machine import describe_run
from linattn.support.options import OptionError
from linattn.support.telling import OnWork

CURVED = "pseudo_riemannian"
FEATURE_RATES = ("input_dropout", "graph_dropout", "dropout")  # the first that acts drops out features
RECIPE = Point()
METRICS = {"nodes": Metric("score", "accuracy"), "links": Metric("score", "ROC AUC")}


class Graphs(Subject):
    """One graph, and the options of every model on it."""

    has_report = False

    def __init__(self, config: GraphCompareConfig, data: GraphData) -> None:
        if config.paper:
            check_paper(tuple(config.models), config.task, data.name)
        self.config, self.data = config, data
        self.metric = METRICS[config.task]
        self.rounds = max(_evaluations(config.train_of(name, data.name, 0)) for name in config.models)
        self.options = {name: self._options(name) for name in config.models}
        self.tried: dict[str, list[Tried]] = {name: [] for name in config.models}
        self.chosen: dict[str, Point] = {}

    def _options(self, name: str) -> dict[str, Any]:
        """Options of the recipe and of the user; if neither has a signature, the space search finds one."""
        model = name.partition("+")[0]
        recipe, known = self.config.recipe(name, self.data.name), graph_model_options(model)
        options = {key: value for key, value in recipe.options.items() if key in known}
        unknown = [key for key in self.config.options.get(model, {}) if key not in known]
        if unknown:
            raise OptionError("option", f"{model} has no {', '.join(unknown)}; it takes {', '.join(known)}")
        if model == CURVED and options.get("signature") is None and recipe.hidden % 2 == 0 and recipe.hidden >= 4:
            found = search_signature(self.data, dimension=recipe.hidden)
            options["signature"] = (found.q, found.p)
        return options

    def options_at(self, name: str, point: Point) -> dict[str, Any]:
        """A model's options with the feature dropout of a grid point, which in some models is that of all layers."""
        if point.dropout is None:
            return self.options[name]
        known = graph_model_options(name.partition("+")[0]) | self.options[name]
        idle = {"graph_dropout"} if known.get("graph_layers") == 0 else set()
        return self.options[name] | {next(r for r in FEATURE_RATES if r in known and r not in idle): point.dropout}

    def create(self, name: str, outputs: int | None, point: Point = RECIPE) -> GraphModel:
        model, _, mechanism = name.partition("+")
        options = self.options_at(name, point)
        if isinstance(options.get("signature"), list):
            options = options | {"signature": tuple(options["signature"])}
        return create_graph_model(
            model,
            in_channels=self.data.num_features,
            hidden=self.config.recipe(name, self.data.name).hidden,
            out_channels=outputs,
            mechanism=mechanism or None,
            task=self.config.task,
            **options,
        )

    def check(self) -> None:
        outputs = create_objective(self.data, self.config.train_of(self.config.models[0], self.data.name, 0)).outputs
        for name in self.config.models:
            try:
                self.create(name, outputs)
            except (ValueError, TypeError) as error:
                raise OptionError("models", f"{name} does not fit: {error}") from error

    def describe(self) -> dict[str, Any]:
        data, config = self.data, self.config
        return {
            **describe_run(torch.device(config.train.device)),
            "kind": "graph",
            "metric": asdict(self.metric),
            "data": {
                "name": data.name, "task": config.task, "nodes": data.num_nodes, "edges": data.num_edges // 2,
                "features": data.num_features, "classes": data.num_classes,
            },
            "train": dict(config.changes) | {"task": config.task},
            "seeds": list(range(config.seeds)),
            "lrs": sorted(set(config.lrs)),
            "weight_decays": list(config.weight_decays),
            "dropouts": list(config.dropouts),
            "grid_seeds": config.grid_seeds,
        }  # fmt: skip

    def announce(self, meta: dict[str, Any]) -> str:
        found = meta["data"]
        what = "classes of nodes" if self.config.task == "nodes" else "links"
        return (
            f"{found['name']}, {what}: {counted(found['nodes'], 'node')}, {counted(found['edges'], 'edge')}, "
            f"{counted(found['features'], 'feature')}, on {meta['device']}"
        )

    def trainer(self, on_step: OnStep, on_record: OnRecord) -> Trainer:
        return GraphTrainer(self, on_record)

    def costs(self, mechanisms: list[str], on_work: OnWork) -> dict[str, dict[str, Any]]:
        """Parameters and the memory of a training step."""
        found, draw = {}, torch.Generator().manual_seed(0)
        for name in mechanisms:
            on_work(f"{name}: memory of a step")
            config = self.config.train_of(name, self.data.name, 0)
            objective = create_objective(self.data, config)
            model = self.create(name, objective.outputs).to(config.device)

            def step(model: GraphModel = model, objective: Objective = objective) -> None:
                objective.loss(model, draw).backward()

            parameters = sum(parameter.numel() for parameter in model.parameters())
            peak = peak_bytes(step, torch.device(config.device))
            found[name] = {"parameters": parameters, "peak_bytes_train": peak}
        return found

    def recipe_lr(self, mechanism: str) -> float:
        return self.config.train_of(mechanism, self.data.name, 0).lr

    def details(self, mechanism: str) -> dict[str, Any]:
        """All settings of a model's runs, and the points that were tried to find them."""
        recipe, point = self.config.recipe(mechanism, self.data.name), self.chosen.get(mechanism, RECIPE)
        train = dict(recipe.train)
        if point.weight_decay is not None:
            train |= dict.fromkeys(DECAYS, point.weight_decay)
        found = {"hidden": recipe.hidden, "options": self.options_at(mechanism, point), "train": train}
        return found | {"grid": [tried._asdict() for tried in self.tried[mechanism]] or None}

    def step_words(self, epoch: int, step: int) -> str:
        return f"epoch {epoch + 1}"


class GraphTrainer(Trainer):
    """Trains graph models. Splits depend on the seed and are the same for all models."""

    def __init__(self, graphs: Graphs, on_record: OnRecord) -> None:
        super().__init__(graphs.config)
        self.graphs, self.on_record = graphs, on_record
        self._objectives: dict[tuple[Any, ...], Objective] = {}
        self.grid = Grid(graphs.config, self.train_one)

    def train(self, cell: Cell) -> Outcome:
        """Train a cell. A run that chooses a learning rate is scored on validation data, at the best point of the grid.

        If there is a grid, its best point is searched once for each model and learning rate.
        """
        output = self.graphs.config.output
        best = self.grid.best(cell)
        if best is None:
            found = self.train_one(cell, RECIPE, cell.folder(output))
            return _outcome(found, cell.validation)
        self.graphs.tried[cell.mechanism] = self.grid.tried(cell.mechanism)
        if cell.validation:
            return Outcome(best.val, best.seconds, [])
        point = self.graphs.chosen[cell.mechanism] = Point(best.weight_decay, best.dropout)
        return _outcome(self.train_one(cell, point, cell.folder(output) / point.name), False)

    def train_one(self, cell: Cell, point: Point, folder: Path) -> GraphResult:
        graphs, name = self.graphs, cell.mechanism
        config = graphs.config.train_of(name, graphs.data.name, cell.seed, cell.lr, point)
        objective = self._objective(config)

        def told(record: GraphRecord) -> None:
            self.on_record(cell, record.val, record.epoch // config.eval_every + 1)

        return train_graph(
            lambda: graphs.create(name, objective.outputs, point),
            objective,
            config,
            folder,
            settings={"model": name, "hidden": graphs.config.recipe(name, graphs.data.name).hidden,
                      "options": graphs.options_at(name, point)},
            on_epoch=told,
        )  # fmt: skip

    def _objective(self, config: GraphConfig) -> Objective:
        key = (config.seed, config.split, config.row_normalize)
        if key not in self._objectives:
            self._objectives = {key: create_objective(self.graphs.data, config)}  # one at a time, as data may be large
        return self._objectives[key]


def _evaluations(train: GraphConfig) -> int:
    return -(-train.epochs // train.eval_every)


def _outcome(found: GraphResult, validation: bool) -> Outcome:
    records = [asdict(record) for record in found.records]
    return Outcome(found.val if validation else found.score, found.seconds, records)
