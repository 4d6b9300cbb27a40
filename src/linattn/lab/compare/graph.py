"""``linattn compare graph``: models on one graph, each with its recipe, tested at the epoch that validation chose."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from linattn.lab.bench.memory import peak_bytes
from linattn.lab.cases import Work
from linattn.lab.compare.comparison import OF_CASES, Comparison, Metric, Point
from linattn.lab.kept import Case
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
from linattn.support.options import OptionError, check_option, options_words

if TYPE_CHECKING:
    from linattn.lab.page import Section

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
        *OF_CASES, "models", "epochs", "hidden", "paper", "weight_decay", "dropout", "grid_seeds"
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
        if not self.models or len(set(self.models)) < len(self.models):
            raise OptionError("models", f"name at least one, and each once, got {', '.join(self.models) or 'none'}")
        super().check()

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # other processes load the data anew

    def contenders(self) -> tuple[str, ...]:
        return self.models

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
    def _settings(self) -> dict[str, dict[str, Any]]:
        return {name: self._settings_of(name.partition("+")[0]) for name in self.models}

    def _settings_of(self, model: str) -> dict[str, Any]:
        """Those of the recipe and of the user; if neither has a signature, the space search finds one."""
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
        return self._settings[name]

    def usual_lr(self, name: str) -> float:
        rate: float = self.options(name)["train"]["lr"]
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
        settings = self.options(name)
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
        options = {key: tuple(v) if isinstance(v, list) else v for key, v in settings["options"].items()}
        return create_graph_model(
            model, in_channels=self.graph.num_features, hidden=settings["hidden"], out_channels=outputs,
            mechanism=mechanism or None, task=self.task, **options,
        )  # fmt: skip

    @cached_property
    def _objectives(self) -> dict[tuple[Any, ...], Objective]:
        return {}

    def objective(self, config: GraphConfig) -> Objective:
        key = config.seed, config.row_normalize
        if key not in self._objectives:
            self._objectives.clear()  # one at a time, as data may be large
            self._objectives[key] = create_objective(self.graph, config)
        return self._objectives[key]

    def check_hosts(self) -> None:
        known = [f"{task} of {data}" for task, data in PAPER]
        if self.paper and not (CURVED in self.owners() and (self.task, self.graph.name.lower()) in PAPER):
            given = f"{', '.join(self.models)} on {self.task} of {self.graph.name}"
            raise OptionError("paper", f"is for {CURVED} on {', '.join(known)}; got {given}")
        for name in self.models:
            try:
                self.model(name, self.objective(self.training(name, 0, {})).outputs, {})
            except OptionError:
                raise
            except (ValueError, TypeError) as error:
                raise OptionError("models", f"{name} does not fit: {error}") from error

    # Cases.

    def run_case(self, case: Case, work: Work) -> Mapping[str, Any]:
        """Train a model. Where the loss of a point is not finite, the point counts as 0 %: others may be better."""
        name, metric = case["mechanism"], self.metric()
        config = self.training(name, case["seed"], case)
        objective = self.objective(config)

        def on_record(record: Record) -> None:
            epoch = record["round"]
            work.tell(epoch / config.epochs, f"epoch {epoch:,} of {config.epochs:,}, {metric.text(record['score'])}")

        try:
            return train_graph(
                lambda: self.model(name, objective.outputs, case), objective, config,
                None if case["validation"] else work.folder, test=not case["validation"], on_record=on_record,
            )  # fmt: skip
        except NotFiniteError as error:
            if not case["validation"]:
                raise
            return {"score": 0.0, "seconds": 0.0, "records": [], "remark": str(error)}

    def cost_case(self, case: Case, work: Work) -> Mapping[str, Any]:
        """Parameters and the memory of a training step."""
        costs, draw = {}, torch.Generator().manual_seed(0)
        for name in [part["mechanism"] for part in case["mechanisms"]]:
            config = self.training(name, 0, {})
            objective = self.objective(config)
            model = self.model(name, objective.outputs, {}).to(config.device)
            step = partial(_backward, objective, model, draw)
            costs[name] = {"parameters": sum(parameter.numel() for parameter in model.parameters()),
                           "peak_bytes_train": peak_bytes(step, torch.device(config.device))}  # fmt: skip
        return {"costs": costs}

    # What is shown.

    def metric(self) -> Metric:
        return Metric("accuracy" if self.task == "nodes" else "ROC AUC", counted="node")

    def describe(self) -> dict[str, Any]:
        graph, edges = self.graph, self.graph.num_edges // 2
        data: dict[str, Any] = {"name": graph.name, "task": self.task, "nodes": graph.num_nodes, "edges": edges,
                "features": graph.num_features, "classes": graph.num_classes}  # fmt: skip
        sizes = [counted(data[f"{one}s"], one) for one in ("node", "edge", "feature")]
        what = "classes of nodes" if self.task == "nodes" else "links"
        about = f"{graph.name}, {what}: {', '.join(sizes)}; {counted(self.seeds, 'seed')}"
        return {"kind": "graph", "data": data, "about": about, "models": self._settings}

    def rows(self, done: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k != "options"} for row in super().rows(done)]  # they are in the meta

    def sections(self, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> "list[Section]":
        """The settings of every model, and all points of the grid, the best of each model first."""
        import pandas

        from linattn.lab.page import Section

        settings = [
            {"model": name, "settings": options_words({"hidden": own["hidden"], **own["options"], **own["train"]})}
            for name, own in meta["models"].items()
        ]
        keys = ("mechanism", "lr", "weight_decay", "dropout", "seed", "score")
        tried = [{key: row[key] for key in keys if row.get(key) is not None} for row in rows if row["kind"] == "sweep"]
        tried.sort(key=lambda row: (self.models.index(row["mechanism"]), -row.get("score", 0.0)))
        text = "The same points for every model; validation data alone choose among them."
        found = [Section("Settings of each model", "Those of its recipe; points of a grid replace them.",
                         pandas.DataFrame(settings))]  # fmt: skip
        return [*found, Section("What was tried", text, pandas.DataFrame(tried))] if tried else found


def _backward(objective: Objective, model: GraphModel, draw: torch.Generator) -> None:
    objective.results(model, "train", draw)[0].backward()
