"""The runs of a comparison: one mechanism with one seed and one learning rate each, in a folder of its own."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linattn.compare.subject import Comparing


@dataclass(frozen=True)
class Cell:
    """One run. ``validation``: judged by data that was held out of training, and that is no test data."""

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
    """For files of a mechanism, or of a pattern of several.

    Example:
        >>> folder_name("gated*3/softmax 64")
        'gatedx3-softmax-64'
    """
    return mechanism.replace("/", "-").replace("*", "x").replace(" ", "-")


@dataclass
class CellResult:
    """What became of a run; ``epochs`` are the records of its evaluations as dicts."""

    cell: Cell
    status: str = "waiting"  # done, failed
    reason: str = ""
    score: float | None = None
    train_seconds: float | None = None
    epochs: list[dict[str, Any]] | None = None
    more: dict[str, Any] | None = None

    def as_row(self, metric: str = "top1") -> dict[str, Any]:
        """Ready for JSON, the score under the name of ``metric``."""
        row = {metric if name == "score" else name: value for name, value in asdict(self).items()}
        cell, more = row.pop("cell"), row.pop("more") or {}
        return {"mechanism": cell["mechanism"], "seed": cell["seed"], "lr": cell["lr"], **row, **more}


def sweep_cells(config: "Comparing") -> list[Cell]:
    """The runs that choose a learning rate; none where there is no choice."""
    lrs = sorted(set(config.lrs))
    if len(lrs) < 2:
        return []
    return [Cell(mechanism, 0, lr, validation=True) for mechanism in config.mechanisms for lr in lrs]


def final_cells(config: "Comparing", lrs: dict[str, float]) -> list[Cell]:
    """Seed by seed, so that after the first round every mechanism has a result.

    Compiled, mechanism by mechanism: then the code that was made for one serves all of its seeds.
    """
    cells = [Cell(name, seed, lrs[name]) for seed in range(config.seeds) for name in config.mechanisms]
    return sorted(cells, key=lambda cell: config.mechanisms.index(cell.mechanism)) if config.train.compile else cells


def runs_to_train(config: "Comparing", sweep_is_final: bool) -> int:
    """How many there are; ``sweep_is_final``: of the first seed those that choose learning rates are the final ones."""
    swept = len(sweep_cells(config))
    return swept + len(config.mechanisms) * (config.seeds - (1 if swept and sweep_is_final else 0))


def best_lrs(
    config: "Comparing",
    swept: list[CellResult],
    higher: bool = True,
    recipe_lr: Callable[[str], float | None] | None = None,
) -> dict[str, float]:
    """For each mechanism the learning rate of the best validation score; the smaller one of equals.

    Without a sweep the one that was named, or that of its recipe, or that of the config.
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
    """The budget of all, with the seed and the learning rate of one."""
    return replace(config.train, seed=cell.seed, lr=cell.lr, min_lr=min(config.train.min_lr, cell.lr))
