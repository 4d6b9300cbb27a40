"""The softmax models to be converted: separate runs, one for each seed, before all others."""

from collections.abc import Sequence
from pathlib import Path

from linattn.lab.compare.cells import Cell
from linattn.lab.compare.conversion.settings import ConversionConfig

SOURCE = "before conversion"  # the name of a softmax model while it is trained


def source_of(config: ConversionConfig, cell: Cell) -> Cell:
    """The run of the softmax model that ``cell`` converts, with the same seed and the same split of images."""
    return Cell(SOURCE, cell.seed, config.train.lr, cell.validation)


def source_cells(config: ConversionConfig, cells: Sequence[Cell]) -> list[Cell]:
    """The softmax runs for these cells, each once, in the order of their seeds."""
    return sorted({source_of(config, cell) for cell in cells}, key=lambda cell: cell.seed)


def run_folder(config: ConversionConfig, cell: Cell) -> Path:
    """The folder of a conversion or of a softmax model, which has only one learning rate."""
    if cell.mechanism != SOURCE:
        return cell.folder(config.output)
    return config.output / ("sweep" if cell.validation else "runs") / SOURCE.replace(" ", "-") / f"seed-{cell.seed}"


def epochs_of(config: ConversionConfig, cell: Cell) -> int:
    return config.train.epochs if cell.mechanism == SOURCE else config.finetuning(cell.seed, cell.lr).epochs
