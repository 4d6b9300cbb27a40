"""Trains the runs of a comparison on images."""

from dataclasses import asdict

import torch

from linattn.lab.compare.cells import Cell, train_config
from linattn.lab.compare.host import create_host
from linattn.lab.compare.settings import CompareConfig
from linattn.lab.compare.subject import OnRecord, OnStep, Outcome, Trainer
from linattn.lab.tasks.images import ImageData, ImageFolders
from linattn.lab.train.batches import create_batches
from linattn.lab.train.loop import train
from linattn.lab.train.mechanism_options import own_options
from linattn.support.options import OptionError

VALIDATION_SHARE = 0.1  # of the training images, held out while learning rates are chosen


class Runner(Trainer):
    """Trains runs on images, all of them on the same data."""

    def __init__(
        self, config: CompareConfig, data: ImageData | ImageFolders, on_step: OnStep, on_record: OnRecord
    ) -> None:
        super().__init__(config)
        self.config, self.data = config, data
        self.on_step, self.on_record = on_step, on_record
        self._held_out: ImageData | None = None

    def train(self, cell: Cell) -> Outcome:
        config = train_config(self.config, cell)
        device = torch.device(config.device)
        data = self._validation_data() if cell.validation else self.data
        model = create_host(cell.mechanism, self.config.host, data, cell.seed).to(device)
        found = train(
            model,
            create_batches(data, config, device),
            config,
            cell.folder(self.config.output),
            options=own_options(cell.mechanism, self.config.host.options),
            on_step=lambda epoch, step, loss, top1: self.on_step(cell, epoch, step, loss, top1),
            on_epoch=lambda record: self.on_record(cell, record.top1, record.epoch + 1),
        )
        return Outcome(found.top1, found.seconds, [asdict(record) for record in found.epochs])

    def _validation_data(self) -> ImageData:
        if self._held_out is None:
            self._held_out = hold_out(self.data, "lr")
        return self._held_out


def hold_out(data: ImageData | ImageFolders, option: str) -> ImageData:
    """Split training images in two, to choose a learning rate; ``option``: the option that needs it, for errors."""
    if not isinstance(data, ImageData):
        raise OptionError(option, "several of them are compared on held-out images, which needs data in memory")
    return data.hold_out(VALIDATION_SHARE, seed=0)
