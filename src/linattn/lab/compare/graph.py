"""``linattn compare graph``: models on one graph, each with its recipe, tested at the epoch that validation chose."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch

from linattn.lab.bench.memory import peak_bytes
from linattn.lab.cases import Case, Work
from linattn.lab.compare.comparison import Comparison, Point
from linattn.lab.compare.findings import Metric
from linattn.lab.page.numbers import counted
from linattn.lab.tasks.graph.data import GraphData
from linattn.lab.tasks.graph.files import load_graph
from linattn.lab.tasks.graph.search import DATA, search_signature
from linattn.lab.train.config import options_of
from linattn.lab.train.graph import (
    GraphConfig,
    NotFiniteError,
    Objective,
    OnGraph,
    Record,
    create_objective,
    train_graph,
)
from linattn.lab.train.graph_recipes import CURVED, PAPER, graph_recipe
from linattn.mechanisms.registry import list_mechanisms
from linattn.models.graph import GraphModel, create_graph_model, graph_model_info, graph_model_options, graph_models
from linattn.support.config import option
from linattn.support.options import OptionError, check_option

DECAYS = ("weight_decay", "attention_weight_decay", "graph_weight_decay")
FEATURE_RATES = ("input_dropout", "graph_dropout", "dropout")  # the first that acts drops out features


@dataclass(frozen=True, kw_only=True)
class CompareGraphs(OnGraph, Comparison):
    """Train models on one graph; table, JSON, CSV and a page. Started again, it goes on.

    Each has the settings of its recipe. Of several values of --lr, --weight-decay and --dropout every model tries all
    combinations, the same for all, and takes what is best on validation data.

    The epoch that counts is chosen on validation data, test data is looked at once. Splits that are drawn, and all
    links, are drawn anew for each seed, the same for all models.

    Exit code: 0 all right, 1 a run failed, 2 a bad option, 130 interrupted (finished runs are kept).
    """

    name: ClassVar[str] = "compare graph"
    # These are in the options of a model or in its points.
    of_cases: ClassVar[tuple[str, ...]] = (
        *Comparison.of_cases, "models", "epochs", "hidden", "paper", "weight_decay", "dropout", "grid_seeds"
    )  # fmt: skip
    data: str = option("communities:1000:4", DATA, group="Data")
    models: tuple[str, ...] = option(
        ("sgc", "gcn", "euclidean", "pseudo_riemannian"),
        "Models, with commas; with another mechanism: euclidean+relu. A wrong one lists all.", group="Comparison",
    )  # fmt: skip
    mechanisms: tuple[str, ...] = option((), "The names of what other comparisons compare.", hidden=True)
    seeds: int = option(5, "Runs of each model.", least=1, group="Comparison")
    epochs: int | None = option(
        None, "Steps over the whole graph.", least=1, group="Training", default_text="300; of a paper's scripts 1000"
    )
    hidden: int | None = option(None, "Width of all models.", least=1, group="Comparison", default_text="by model")
    lr: tuple[float, ...] = option(
        (), "Learning rate; of several, each takes its best on validation.", above=0, group="Training",
        default_text="by model",
    )  # fmt: skip
    weight_decay: tuple[float, ...] = option(
        (), "Weight decay of all parameters; several: a grid with --lr and --dropout.", least=0, group="Training",
        default_text="by model",
    )  # fmt: skip
    dropout: tuple[float, ...] = option(
        (), "Dropout of the features, or of all layers in models with one rate; several: a grid.", least=0, below=1,
        group="Training", default_text="by model",
    )  # fmt: skip
    grid_seeds: int = option(1, "Runs at each point of a grid of several settings.", least=1, group="Comparison")
    paper: bool = option(
        False, "Settings of the paper's scripts for pseudo_riemannian: Cora, Citeseer, PubMed, and links of tree:4:6.",
        group="Comparison",
    )  # fmt: skip
    option: dict[str, Any] = option(
        {}, "Option of models: key=value for all, model.key=value for one; may be given again.", group="Comparison"
    )

    def check(self) -> None:
        for name in self.models:
            model, _, mechanism = name.partition("+")
            check_option("models", model, graph_models())
            if mechanism:
                check_option("models", mechanism, list_mechanisms(bidirectional=True))
                if not graph_model_info(model).takes_mechanism:
                    raise OptionError("models", f"{model} takes no mechanism: leave {mechanism} out")
        super().check()

    def contenders(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.models))

    def owners(self) -> Collection[str]:
        return {name.partition("+")[0] for name in self.models}

    def at_a_time(self) -> int:
        return self.jobs or 1  # a run fills the device

    @property
    def folder(self) -> Path:
        data = self.data.strip("/").split("/")[-1].replace(":", "-")
        return self.output or Path("runs") / f"graph-{data}-{self.task}"

    # Data, settings and models.

    @cached_property
    def graph(self) -> GraphData:
        return load_graph(self.data)

    @cached_property
    def settings(self) -> dict[str, dict[str, Any]]:
        """By name of a model, those of the recipe and of the user; if neither has a signature, the space search finds
        one."""
        return {name: self._settings_of(name.partition("+")[0]) for name in self.models}

    def _settings_of(self, model: str) -> dict[str, Any]:
        recipe, known = graph_recipe(model, self.task, self.graph.name, paper=self.paper), graph_model_options(model)
        own = {key.rpartition(".")[2] for key in self.option if key.rpartition(".")[0] == model}
        if unknown := sorted(own - known.keys()):
            raise OptionError("option", f"{model} has no {', '.join(unknown)}; it takes {', '.join(known)}")
        hidden, options = self.hidden or recipe.hidden, dict(recipe.options)
        if hidden != recipe.hidden:
            options.pop("signature", None)  # its dimensions add up to another width
        options |= {key: value for key, value in options_of(model, self.option).items() if key in known}
        if model == CURVED and options.get("signature") is None and hidden % 2 == 0 and hidden >= 4:
            options["signature"] = search_signature(self.graph, dimension=hidden)[:2]
        epochs = {} if self.epochs is None else {"epochs": self.epochs}
        return {"hidden": hidden, "options": options, "train": {**recipe.train, **epochs}}

    def options(self, name: str) -> dict[str, Any]:
        return self.settings[name]

    def usual_lr(self, name: str) -> float:
        rate: float = self.settings[name]["train"]["lr"]
        return rate

    @property
    def sweep_seeds(self) -> int:  # type: ignore[override]
        return self.grid_seeds

    def points(self, name: str) -> list[Point]:
        """The points of the grid, the same for all models but for what is by recipe."""
        swept = {"weight_decay": self.weight_decay, "dropout": self.dropout}
        values = {"lr": sorted(set(self.lr)) or [self.usual_lr(name)]} | {key: v for key, v in swept.items() if v}
        return [dict(zip(values, point, strict=True)) for point in product(*values.values())]

    def settings_at(self, name: str, point: Mapping[str, Any]) -> dict[str, Any]:
        """All settings of a run: ``hidden``, ``options`` of the model, and ``train``.

        The dropout of a point is that of the features, which in some models is that of all layers.
        """
        settings = self.settings[name]
        options, train = dict(settings["options"]), settings["train"] | {"lr": point.get("lr", self.usual_lr(name))}
        if "weight_decay" in point:
            train |= dict.fromkeys(DECAYS, point["weight_decay"])
        if "dropout" in point:
            known = graph_model_options(name.partition("+")[0]) | options
            idle = {"graph_dropout"} if known.get("graph_layers") == 0 else set()
            options[next(rate for rate in FEATURE_RATES if rate in known and rate not in idle)] = point["dropout"]
        return {"hidden": settings["hidden"], "options": options, "train": train}

    def training(self, name: str, seed: int, point: Mapping[str, Any]) -> GraphConfig:
        common = {field.name: getattr(self, field.name) for field in fields(OnGraph)}
        settings = common | self.settings_at(name, point)["train"]
        return GraphConfig(**settings, seed=seed, device=str(self.place()))

    def model(self, name: str, outputs: int | None, point: Mapping[str, Any]) -> GraphModel:
        model, _, mechanism = name.partition("+")
        settings = self.settings_at(name, point)
        options: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else v for key, v in settings["options"].items()
        }
        options |= {"in_channels": self.graph.num_features, "hidden": settings["hidden"], "out_channels": outputs}
        return create_graph_model(model, mechanism=mechanism or None, task=self.task, **options)

    def objective(self, config: GraphConfig) -> Objective:
        """The task on the split of a seed; only the last one is kept, as data may be large."""
        key, kept = (config.seed, config.row_normalize), self._last_objective
        if key not in kept:
            kept.clear()
            kept[key] = create_objective(self.graph, config)
        return kept[key]

    @cached_property
    def _last_objective(self) -> dict[tuple[Any, ...], Objective]:
        return {}

    def check_hosts(self) -> None:
        known = [f"{task} of {data}" for task, data in PAPER]
        if self.paper and not (CURVED in self.owners() and (self.task, self.graph.name.lower()) in PAPER):
            given = f"{', '.join(self.models)} on {self.task} of {self.graph.name}"
            raise OptionError("paper", f"is for {CURVED} on {', '.join(known)}; got {given}")
        for name in self.models:
            try:
                self.model(name, self.objective(self.training(name, 0, {})).outputs, {})
            except (ValueError, TypeError) as error:
                raise error if isinstance(error, OptionError) else OptionError("models", f"{name}: {error}") from error

    # Cases.

    def run_case(self, case: Case, work: Work) -> Mapping[str, Any]:
        """Train a model. Where the loss of a point is not finite, the point counts as 0 %: others may be better."""
        name, choosing = case["mechanism"], case["validation"]
        config = self.training(name, case["seed"], case)
        objective = self.objective(config)

        def create() -> GraphModel:
            return self.model(name, objective.outputs, case)

        def on_record(record: Record) -> None:
            words = f"epoch {record['round']:,} of {config.epochs:,}, {self.metric().text(record['score'])}"
            work.tell(record["round"] / config.epochs, words)

        try:
            folder = None if choosing else work.folder
            return train_graph(create, objective, config, folder, test=not choosing, on_record=on_record)
        except NotFiniteError as error:
            if not choosing:
                raise
            return {"score": 0.0, "seconds": 0.0, "records": [], "remark": str(error)}

    def cost_case(self, case: Case, work: Work) -> Mapping[str, Any]:
        """Parameters and the memory of a training step."""
        rows, draw = [], torch.Generator().manual_seed(0)
        for name in [part["mechanism"] for part in case["mechanisms"]]:
            config = self.training(name, 0, {})
            objective = self.objective(config)
            model = self.model(name, objective.outputs, {}).to(config.device)
            peak = peak_bytes(partial(_backward, objective, model, draw), torch.device(config.device))
            size = sum(parameter.numel() for parameter in model.parameters())
            rows.append({"mechanism": name, "parameters": size, "peak_bytes_train": peak})
        return {"rows": rows}

    # What is shown.

    def metric(self) -> Metric:
        return Metric("accuracy" if self.task == "nodes" else "ROC AUC", counted="node")

    def describe(self) -> dict[str, Any]:
        graph = self.graph
        sizes = {"nodes": graph.num_nodes, "edges": graph.num_edges // 2, "features": graph.num_features}
        data = {"name": graph.name, "task": self.task, **sizes, "classes": graph.num_classes}
        what = "classes of nodes" if self.task == "nodes" else "links"
        words = [counted(size, name[:-1]) for name, size in sizes.items()]
        about = f"{graph.name}, {what}: {', '.join(words)}; {counted(self.seeds, 'seed')}"
        return {"kind": "graph", "data": data, "about": about, "models": self.settings}


def _backward(objective: Objective, model: GraphModel, draw: torch.Generator) -> None:
    objective.results(model, "train", draw)[0].backward()
