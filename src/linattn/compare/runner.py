"""Trains the runs of a comparison, one after the other; what was finished is never trained again."""

from collections.abc import Callable
from dataclasses import asdict

import torch

from linattn.compare.cells import Cell, CellResult, train_config
from linattn.compare.host import create_host
from linattn.compare.settings import CompareConfig
from linattn.support.options import OptionError
from linattn.tasks.images import ImageData, ImageFolders
from linattn.train.batches import create_batches
from linattn.train.loop import EpochRecord, TrainResult, train

VALIDATION_SHARE = 0.1  # of the training images, held out while learning rates are chosen

OnStep = Callable[[Cell, int, int, float, float], None]
OnEpoch = Callable[[Cell, EpochRecord], None]


class Runner:
    """Holds the data, so that all runs see the same."""

    def __init__(
        self, config: CompareConfig, data: ImageData | ImageFolders, on_step: OnStep, on_epoch: OnEpoch
    ) -> None:
        self.config, self.data = config, data
        self.on_step, self.on_epoch = on_step, on_epoch
        self._held_out: ImageData | None = None
        self._last = ""  # mechanism

    def run(self, cell: Cell) -> CellResult:
        """Train one; a run that fails says why and leaves the others alone."""
        try:
            found = self._train(cell)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, OptionError):
                raise  # wrong for all of them, and the user's to mend
            return CellResult(cell, "failed", reason=" ".join(str(error).split())[:300])
        return CellResult(cell, "done", "", found.top1, found.seconds, [asdict(record) for record in found.epochs])

    def _train(self, cell: Cell) -> TrainResult:
        config = train_config(self.config, cell)
        device = torch.device(config.device)
        data = self._validation_data() if cell.validation else self.data
        if config.compile and cell.mechanism != self._last:
            torch._dynamo.reset()  # else every call would first be held against the code of all mechanisms before
        self._last = cell.mechanism
        model = create_host(cell.mechanism, self.config.host, data, cell.seed).to(device)
        return train(
            model,
            create_batches(data, config, device),
            config,
            cell.folder(self.config.output),
            on_step=lambda epoch, step, loss, top1: self.on_step(cell, epoch, step, loss, top1),
            on_epoch=lambda record: self.on_epoch(cell, record),
        )

    def _validation_data(self) -> ImageData:
        if not isinstance(self.data, ImageData):
            raise OptionError("lr", "several of them are compared on held-out images, which needs data in memory")
        if self._held_out is None:
            self._held_out = self.data.hold_out(VALIDATION_SHARE, seed=0)
        return self._held_out
