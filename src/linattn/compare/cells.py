"""The runs of a comparison: one mechanism with one seed and one learning rate each, in a folder of its own."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from linattn.compare.settings import CompareConfig
from linattn.train.config import TrainConfig


@dataclass(frozen=True)
class Cell:
    """One run. ``validation``: trained without a part of the training images and judged by those."""

    mechanism: str
    seed: int
    lr: float
    validation: bool = False

    @property
    def title(self) -> str:
        return f"{self.mechanism}, lr {self.lr:g}" + ("" if self.validation else f", seed {self.seed}")

    def folder(self, output: Path) -> Path:
        kind = "sweep" if self.validation else "runs"
        return output / kind / self.mechanism / f"lr-{self.lr:g}-seed-{self.seed}"


@dataclass
class CellResult:
    """What became of a run; ``epochs`` are those of ``linattn.train.loop.EpochRecord`` as dicts."""

    cell: Cell
    status: str = "waiting"  # done, failed
    reason: str = ""
    top1: float | None = None
    train_seconds: float | None = None
    epochs: list[dict[str, Any]] | None = None

    def as_row(self) -> dict[str, Any]:
        row = asdict(self)
        cell = row.pop("cell")
        return {"mechanism": cell["mechanism"], "seed": cell["seed"], "lr": cell["lr"], **row}


def sweep_cells(config: CompareConfig) -> list[Cell]:
    """The runs that choose a learning rate; none where there is no choice."""
    lrs = sorted(set(config.lrs))
    if len(lrs) < 2:
        return []
    return [Cell(mechanism, 0, lr, validation=True) for mechanism in config.mechanisms for lr in lrs]


def final_cells(config: CompareConfig, lrs: dict[str, float]) -> list[Cell]:
    """Seed by seed, so that after the first round every mechanism has a result.

    Compiled, mechanism by mechanism: then the code that was made for one serves all of its seeds.
    """
    cells = [Cell(name, seed, lrs[name]) for seed in range(config.seeds) for name in config.mechanisms]
    return sorted(cells, key=lambda cell: config.mechanisms.index(cell.mechanism)) if config.train.compile else cells


def best_lrs(config: CompareConfig, swept: list[CellResult]) -> dict[str, float]:
    """For each mechanism the learning rate of the best validation accuracy; the smaller one of equals."""
    only = config.lrs[0] if config.lrs else config.train.lr
    lrs = dict.fromkeys(config.mechanisms, only)
    for name in config.mechanisms:
        found = [r for r in swept if r.cell.mechanism == name and r.top1 is not None]
        if found:
            lrs[name] = max(found, key=lambda r: (r.top1, -r.cell.lr)).cell.lr
    return lrs


def train_config(config: CompareConfig, cell: Cell) -> TrainConfig:
    """The budget of all, with the seed and the learning rate of one."""
    return replace(config.train, seed=cell.seed, lr=cell.lr, min_lr=min(config.train.min_lr, cell.lr))
