"""Trains softmax models, converts them, and trains them on."""

from collections.abc import Iterator
from dataclasses import asdict
from json import loads
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linattn.compare.cells import Cell
from linattn.compare.conversion.models import convert_model, create_deit
from linattn.compare.conversion.settings import ConversionConfig
from linattn.compare.runner import hold_out
from linattn.compare.subject import OnRecord, OnStep, Outcome, Trainer
from linattn.support.files import write_json
from linattn.tasks.images import ImageData, ImageFolders
from linattn.train.accelerator import create_accelerator, matrix_products
from linattn.train.batches import create_batches
from linattn.train.checkpoint import RunFolder
from linattn.train.config import TrainConfig
from linattn.train.evaluate import evaluate
from linattn.train.loop import train
from linattn.train.records import DivergedError, TrainResult

SOURCE = "before conversion"  # what a softmax model is called while it is trained


class ConversionTrainer(Trainer):
    """All softmax models first, since converted ones have other compiled code; each is kept and never trained again."""

    def __init__(
        self, config: ConversionConfig, data: ImageData | ImageFolders, on_step: OnStep, on_record: OnRecord
    ) -> None:
        super().__init__(config)
        self.config, self.data = config, data
        self.on_step, self.on_record = on_step, on_record
        self._held_out: ImageData | None = None
        self._sources: dict[tuple[int, bool], float | DivergedError] = {}

    def train(self, cell: Cell) -> Outcome:
        """``top1_before`` and ``top1_converted`` beside the score, which is that after training on."""
        for seed in [0] if cell.validation else range(self.config.seeds):
            self._train_source(seed, cell.validation)
        before = self._sources[cell.seed, cell.validation]
        if isinstance(before, DivergedError):
            raise before
        config, data = self.config.finetuning(cell.seed, cell.lr), self._data(cell.validation)
        batches = create_batches(data, config, torch.device(config.device))
        model = create_deit(self.config, data, cell.seed)
        model.load_state_dict(RunFolder(self._source_folder(cell.seed, cell.validation)).load_weights())
        model, report = convert_model(model, self.config, cell.mechanism, cell.seed)
        model.to(config.device)
        found, folder = {"top1_before": before}, cell.folder(self.config.output)
        found |= remembered_look(folder / "converted.json", model, batches.test(), config)
        result = train(
            model,
            batches,
            config,
            folder,
            on_step=lambda epoch, step, loss, top1: self.on_step(cell, epoch, step, loss, top1),
            on_epoch=lambda record: self.on_record(cell, record.top1, record.epoch + 1),
        )
        counts = {name: len(getattr(report, name)) for name in ("kept", "initialised", "dropped")}
        more = {**found, "conversion": counts}
        return Outcome(result.top1, result.seconds, [asdict(record) for record in result.epochs], more)

    def _train_source(self, seed: int, validation: bool) -> None:
        if (seed, validation) in self._sources:
            return
        config, data = self.config.source(seed), self._data(validation)
        cell = Cell(SOURCE, seed, config.lr)
        try:
            found: TrainResult = train(
                create_deit(self.config, data, seed).to(config.device),
                create_batches(data, config, torch.device(config.device)),
                config,
                self._source_folder(seed, validation),
                on_step=lambda epoch, step, loss, top1: self.on_step(cell, epoch, step, loss, top1),
            )
            self._sources[seed, validation] = found.top1
        except DivergedError as error:  # of this seed alone
            self._sources[seed, validation] = error
        if config.compile:
            torch._dynamo.reset()

    def _source_folder(self, seed: int, validation: bool) -> Path:
        return self.config.output / ("sweep" if validation else "runs") / SOURCE.replace(" ", "-") / f"seed-{seed}"

    def _data(self, validation: bool) -> ImageData | ImageFolders:
        if not validation:
            return self.data
        if self._held_out is None:
            self._held_out = hold_out(self.data, "finetune_lr")
        return self._held_out


def remembered_look(
    path: Path, model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], config: TrainConfig
) -> dict[str, Any]:
    """Accuracy of a model that was converted and not trained since, from the first look at it."""
    if not path.exists():
        with matrix_products(config.precision):
            found = evaluate(model, batches, create_accelerator(config))
        write_json(path, {"top1_converted": found.accuracy})
    stored: dict[str, Any] = loads(path.read_text())
    return stored
