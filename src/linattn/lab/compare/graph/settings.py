"""The config of a comparison of graph models."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from linattn.lab.train.graph.config import GraphConfig
from linattn.lab.train.graph.recipes import Recipe, graph_recipe
from linattn.lab.train.mechanism_options import check_compared
from linattn.mechanisms.registry import list_mechanisms
from linattn.models.graph import graph_model_info, graph_models
from linattn.support.options import OptionError, check_option

DECAYS = ("weight_decay", "attention_weight_decay", "graph_weight_decay")


class Point(NamedTuple):
    """A point of the grid; None: as in the recipe."""

    weight_decay: float | None = None
    dropout: float | None = None

    @property
    def name(self) -> str:
        return f"decay-{_text(self.weight_decay)}-dropout-{_text(self.dropout)}"


def _text(value: float | None) -> str:
    return "recipe" if value is None else f"{value:g}"


@dataclass(frozen=True)
class GraphCompareConfig:
    """Models on one graph, each with the settings of its recipe except for ``changes``."""

    data: str = "communities:1000:4"
    models: tuple[str, ...] = ("sgc", "gcn", "euclidean", "pseudo_riemannian")
    """``model``, or ``model+mechanism`` for a model whose attention can be exchanged."""
    task: str = "nodes"
    hidden: int | None = None
    """Width of all models; None: as in the recipe."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of models, by model; options under the empty name are for all models that have them."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``GraphConfig`` for all models; None: as in the recipe."""
    seeds: int = 5
    lrs: tuple[float, ...] = ()
    """Learning rates; of several, each model takes the best on validation data."""
    weight_decays: tuple[float, ...] = ()
    """Weight decays of all parameters; several make up a grid with the learning rates, the same for all models."""
    dropouts: tuple[float, ...] = ()
    """Dropout of the features, or of all layers in models with one rate for all; several are in the grid."""
    paper: bool = False
    """Use the settings of a paper's scripts for the data, if ``recipes.PAPER`` has them."""
    grid_seeds: int = 1
    """Runs at each point of the grid; the mean of their validation scores counts."""
    output: Path = Path("runs/graph")
    jobs: int = 1
    """Always 1: a run fills the device."""

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The contenders, under the name that all comparisons have for them."""
        return self.models

    @property
    def train(self) -> GraphConfig:
        """The training config that all models have in common."""
        given = {name: value for name, value in self.changes.items() if value is not None}
        return replace(GraphConfig(task=self.task), **given)

    def recipe(self, name: str, data: str) -> Recipe:
        """The recipe of the contender ``name`` on the data set named ``data``, with all changes."""
        model = name.partition("+")[0]
        found = graph_recipe(model, self.task, data, paper=self.paper)
        hidden = self.hidden or found.hidden
        options = dict(found.options) | dict(self.options.get("", {})) | dict(self.options.get(model, {}))
        if self.hidden not in (None, found.hidden) and "signature" not in self.options.get(model, {}):
            options.pop("signature", None)  # its dimensions add up to another width
        given = {name: value for name, value in self.changes.items() if value is not None}
        return Recipe(hidden, options, {**found.train, **given})

    @property
    def points(self) -> list[Point]:
        """The points of the grid at each learning rate; a single point of None if there is no grid."""
        return [Point(w, d) for w in self.weight_decays or (None,) for d in self.dropouts or (None,)]

    def train_of(
        self, name: str, data: str, seed: int, lr: float | None = None, point: Point | None = None
    ) -> GraphConfig:
        settings = {"task": self.task, **self.recipe(name, data).train, "seed": seed}
        if point is not None and point.weight_decay is not None:
            settings |= dict.fromkeys(DECAYS, point.weight_decay)
        return GraphConfig(**(settings if lr is None else settings | {"lr": lr}))

    def check(self) -> None:
        """Raise an OptionError that names the option and what is allowed."""
        if not self.models:
            raise OptionError("models", f"name at least one of {', '.join(graph_models())}")
        if len(set(self.models)) < len(self.models):
            raise OptionError("models", f"each may be named once, got {', '.join(self.models)}")
        for name in self.models:
            model, _, mechanism = name.partition("+")
            check_option("models", model, graph_models())
            if mechanism:
                check_option("models", mechanism, list_mechanisms(bidirectional=True))
                if not graph_model_info(model).takes_mechanism:
                    raise OptionError("models", f"{model} takes no mechanism: leave {mechanism} out")
        used = {name.partition("+")[0] for name in self.models}
        check_compared(self.options, used)
        if self.seeds < 1:
            raise OptionError("seeds", f"must be an integer >= 1, got {self.seeds}")
        if self.hidden is not None and self.hidden < 1:
            raise OptionError("hidden", f"must be an integer >= 1, got {self.hidden}")
        if any(not lr > 0 for lr in self.lrs):
            raise OptionError("lr", f"must be greater than 0, got {', '.join(map(str, self.lrs))}")
        for option, given, most in (("weight_decay", self.weight_decays, None), ("dropout", self.dropouts, 1)):
            if any(value < 0 or (most is not None and value >= most) for value in given):
                allowed = "at least 0" + (f" and less than {most}" if most else "")
                raise OptionError(option, f"must be {allowed}, got {', '.join(map(str, given))}")
        if self.grid_seeds < 1:
            raise OptionError("grid_seeds", f"must be an integer >= 1, got {self.grid_seeds}")
        self.train.check()

    def fingerprint(self) -> dict[str, Any]:
        """What all runs of a folder must have in common; models, seeds and points of the grid may be added later."""
        changes = {
            name: value for name, value in sorted(self.changes.items()) if value is not None and name != "device"
        }
        options = {name: dict(given) for name, given in sorted(self.options.items())}
        return {
            "data": self.data, "task": self.task, "hidden": self.hidden, "options": options, "changes": changes,
            "paper": self.paper,
        }  # fmt: skip
