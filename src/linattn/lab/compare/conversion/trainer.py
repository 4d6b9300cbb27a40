"""Trains softmax models, converts them, and trains them further."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from json import loads
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linattn.lab.compare.cells import Cell
from linattn.lab.compare.conversion.models import convert_model, create_deit
from linattn.lab.compare.conversion.settings import ConversionConfig
from linattn.lab.compare.conversion.sources import SOURCE, run_folder, source_of
from linattn.lab.compare.runner import hold_out
from linattn.lab.compare.subject import OnRecord, OnStep, Outcome, Trainer
from linattn.lab.tasks.images import ImageData, ImageFolders
from linattn.lab.train.accelerator import create_accelerator, matrix_products
from linattn.lab.train.batches import create_batches
from linattn.lab.train.config import TrainConfig
from linattn.lab.train.evaluate import evaluate
from linattn.lab.train.loop import train
from linattn.lab.train.records import DivergedError, TrainResult
from linattn.support.checkpoint import RunFolder
from linattn.support.files import write_json


class ConversionTrainer(Trainer):
    """Trains softmax models and their conversions; each softmax model is kept and never trained again.

    If one run is trained at a time, all softmax models come first, as converted models have other compiled code. With
    several processes they are runs like others, finished before any conversion starts (``compare.workers``).
    """

    def __init__(
        self, config: ConversionConfig, data: ImageData | ImageFolders, on_step: OnStep, on_record: OnRecord
    ) -> None:
        super().__init__(config)
        self.config, self.data = config, data
        self.on_step, self.on_record = on_step, on_record
        self._held_out: ImageData | None = None
        self._sources: dict[Cell, TrainResult | DivergedError] = {}

    def train(self, cell: Cell) -> Outcome:
        """Train a cell. The score is that after further training, beside ``top1_before`` and ``top1_converted``."""
        if cell.mechanism == SOURCE:
            found = self._source(cell)
            return Outcome(found.top1, found.seconds, [asdict(record) for record in found.epochs])
        if self.config.jobs == 1:
            for seed in [0] if cell.validation else range(self.config.seeds):
                with suppress(DivergedError):  # this concerns only that seed
                    self._source(source_of(self.config, replace(cell, seed=seed)))
        source = source_of(self.config, cell)
        before = self._source(source).top1
        config, data = self.config.finetuning(cell.seed, cell.lr), self._data(cell.validation)
        batches = create_batches(data, config, torch.device(config.device))
        model = create_deit(self.config, data, cell.seed)
        model.load_state_dict(RunFolder(run_folder(self.config, source)).load_weights())
        model, report = convert_model(model, self.config, cell.mechanism, cell.seed)
        model.to(config.device)
        found_before, folder = {"top1_before": before}, run_folder(self.config, cell)
        found_before |= remembered_look(folder / "converted.json", model, batches.test(), config)
        result = train(
            model,
            batches,
            config,
            folder,
            on_step=lambda epoch, step, loss, top1: self.on_step(cell, epoch, step, loss, top1),
            on_epoch=lambda record: self.on_record(cell, record.top1, record.epoch + 1),
        )
        counts = {name: len(getattr(report, name)) for name in ("kept", "initialised", "dropped")}
        more = {**found_before, "conversion": counts}
        return Outcome(result.top1, result.seconds, [asdict(record) for record in result.epochs], more)

    def _source(self, cell: Cell) -> TrainResult:
        """Train the softmax model of ``cell`` unless that is done; raise again, at once, if it diverged."""
        if cell not in self._sources:
            config, data = self.config.source(cell.seed), self._data(cell.validation)
            try:
                self._sources[cell] = train(
                    create_deit(self.config, data, cell.seed).to(config.device),
                    create_batches(data, config, torch.device(config.device)),
                    config,
                    run_folder(self.config, cell),
                    on_step=lambda epoch, step, loss, top1: self.on_step(cell, epoch, step, loss, top1),
                )
            except DivergedError as error:
                self._sources[cell] = error
            if config.compile:
                torch._dynamo.reset()
        found = self._sources[cell]
        if isinstance(found, DivergedError):
            raise found
        return found

    def _data(self, validation: bool) -> ImageData | ImageFolders:
        if not validation:
            return self.data
        if self._held_out is None:
            self._held_out = hold_out(self.data, "finetune_lr")
        return self._held_out


def remembered_look(
    path: Path, model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], config: TrainConfig
) -> dict[str, Any]:
    """Evaluate a model right after its conversion, or read the result of an earlier evaluation from ``path``."""
    if not path.exists():
        with matrix_products(config.precision):
            found = evaluate(model, batches, create_accelerator(config))
        write_json(path, {"top1_converted": found.accuracy})
    stored: dict[str, Any] = loads(path.read_text())
    return stored
