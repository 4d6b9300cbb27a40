"""The softmax models that conversions begin with: runs of their own, one a seed, before all others."""

from collections.abc import Sequence
from pathlib import Path

from linattn.compare.cells import Cell
from linattn.compare.conversion.settings import ConversionConfig

SOURCE = "before conversion"  # what a softmax model is called while it is trained


def source_of(config: ConversionConfig, cell: Cell) -> Cell:
    """The run whose model ``cell`` converts: that of its seed, on the images it is judged by."""
    return Cell(SOURCE, cell.seed, config.train.lr, cell.validation)


def source_cells(config: ConversionConfig, cells: Sequence[Cell]) -> list[Cell]:
    """Each of them once, in order of their seeds."""
    return sorted({source_of(config, cell) for cell in cells}, key=lambda cell: cell.seed)


def run_folder(config: ConversionConfig, cell: Cell) -> Path:
    """Of a conversion or of a softmax model, which has one learning rate."""
    if cell.mechanism != SOURCE:
        return cell.folder(config.output)
    return config.output / ("sweep" if cell.validation else "runs") / SOURCE.replace(" ", "-") / f"seed-{cell.seed}"


def epochs_of(config: ConversionConfig, cell: Cell) -> int:
    return config.train.epochs if cell.mechanism == SOURCE else config.finetuning(cell.seed, cell.lr).epochs
