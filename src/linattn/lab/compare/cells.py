"""Cells: the runs of a comparison, each with one mechanism, seed and learning rate, in its own folder."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linattn.lab.compare.subject import Comparing


@dataclass(frozen=True)
class Cell:
    """One run. ``validation``: whether it is judged by held-out training data, and not by test data."""

    mechanism: str
    seed: int
    lr: float
    validation: bool = False

    @property
    def title(self) -> str:
        return f"{self.mechanism}, lr {self.lr:g}" + ("" if self.validation else f", seed {self.seed}")

    def folder(self, output: Path) -> Path:
        kind = "sweep" if self.validation else "runs"
        return output / kind / folder_name(self.mechanism) / f"lr-{self.lr:g}-seed-{self.seed}"


def folder_name(mechanism: str) -> str:
    """The name of the folder for a mechanism, or for a pattern of several.

    Example:
        >>> folder_name("gated*3/softmax 64")
        'gatedx3-softmax-64'
    """
    return mechanism.replace("/", "-").replace("*", "x").replace(" ", "-")


@dataclass
class CellResult:
    """The outcome of a run; ``epochs`` are the records of its evaluations as dicts."""

    cell: Cell
    status: str = "waiting"  # done, failed
    reason: str = ""
    score: float | None = None
    train_seconds: float | None = None
    epochs: list[dict[str, Any]] | None = None
    more: dict[str, Any] | None = None

    def as_row(self, metric: str = "top1") -> dict[str, Any]:
        """The result as a dict for JSON, with the score under the name ``metric``."""
        row = {metric if name == "score" else name: value for name, value in asdict(self).items()}
        cell, more = row.pop("cell"), row.pop("more") or {}
        return {"mechanism": cell["mechanism"], "seed": cell["seed"], "lr": cell["lr"], **row, **more}


def sweep_cells(config: "Comparing") -> list[Cell]:
    """The runs that choose learning rates; none if only one rate is given, or none."""
    lrs = sorted(set(config.lrs))
    if len(lrs) < 2:
        return []
    return [Cell(mechanism, 0, lr, validation=True) for mechanism in config.mechanisms for lr in lrs]


def final_cells(config: "Comparing", lrs: dict[str, float]) -> list[Cell]:
    """The final runs, seed by seed, so that every mechanism has a result after the first round.

    With compiled code they are mechanism by mechanism, so that code compiled for one is used for all of its seeds.
    """
    cells = [Cell(name, seed, lrs[name]) for seed in range(config.seeds) for name in config.mechanisms]
    return sorted(cells, key=lambda cell: config.mechanisms.index(cell.mechanism)) if config.train.compile else cells


def runs_to_train(config: "Comparing", sweep_is_final: bool) -> int:
    """The number of runs to train; ``sweep_is_final``: those that choose rates are the final ones of the first seed."""
    swept = len(sweep_cells(config))
    return swept + len(config.mechanisms) * (config.seeds - (1 if swept and sweep_is_final else 0))


def best_lrs(
    config: "Comparing",
    swept: list[CellResult],
    higher: bool = True,
    recipe_lr: Callable[[str], float | None] | None = None,
) -> dict[str, float]:
    """For each mechanism the learning rate with the best validation score; among equals the smallest.

    Without a sweep it is the one that was given, or that of the mechanism's recipe, or that of the config.
    """
    sign = 1 if higher else -1
    given = config.lrs[0] if config.lrs else None
    lrs = {name: given or (recipe_lr and recipe_lr(name)) or config.train.lr for name in config.mechanisms}
    for name in config.mechanisms:
        found = [r for r in swept if r.cell.mechanism == name and r.score is not None]
        if found:
            lrs[name] = max(found, key=lambda r: (sign * (r.score or 0.0), -r.cell.lr)).cell.lr
    return lrs


def train_config(config: "Comparing", cell: Cell) -> Any:
    """The config of one run: the common one with the seed and learning rate of the cell."""
    return replace(config.train, seed=cell.seed, lr=cell.lr, min_lr=min(config.train.min_lr, cell.lr))


def groups_to_measure(names: list[str], device: Any) -> list[list[str]]:
    """Groups of mechanisms that are timed in turns."""
    return [[name] for name in names] if device.type == "cuda" else [names]
