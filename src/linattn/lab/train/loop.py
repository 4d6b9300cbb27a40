"""The training loop for images."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from linattn.lab.train.accelerator import check_accelerator, create_accelerator, matrix_products
from linattn.lab.train.config import TrainConfig
from linattn.lab.train.fingerprint import run_fingerprint
from linattn.lab.train.log import write_log
from linattn.lab.train.records import DivergedError, EpochRecord, TrainResult
from linattn.lab.train.rounds import OnStep, Record, Rounds
from linattn.lab.train.run import Run
from linattn.support.checkpoint import ResumeError, RunFolder
from linattn.support.extras import need

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    from linattn.lab.train.batches import Batches

__all__ = ["DivergedError", "EpochRecord", "ResumeError", "TrainResult", "train"]


def train(
    model: nn.Module,
    batches: "Batches",
    config: TrainConfig,
    folder: Path,
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    on_step: OnStep | None = None,
    on_epoch: Callable[[EpochRecord], None] | None = None,
    accelerator: "Accelerator | None" = None,
) -> TrainResult:
    """Train ``model``, or resume the run in ``folder`` where it was stopped; a finished run is returned at once.

    Afterwards the model is in ``eval`` mode and has the weights that were evaluated last: the averaged ones with
    ``ema_decay``, else its own. ``folder`` has them as ``weights.pt``, beside ``result.json`` and ``log.jsonl``.

    A step depends only on the weights, the optimiser, the seed and its own number, so that a run that was killed and
    resumed ends in the same weights as one that was not. For that the model must have the same first weights: seed
    torch before creating it. On a CPU this holds to the last bit, on a GPU as far as its kernels add in a fixed order.
    Steps that are replayed as CUDA graphs draw the same random numbers as others, and a stopped run may be resumed with
    graphs or without; the only difference is that graphs round the learning rate to fp32.

    Args:
        model: maps images ``(b, C, H, W)`` to logits ``(b, classes)``.
        batches: this process's batches from ``linattn.lab.train.batches.create_batches``, on the device of the config.
        folder: a folder for this run alone.
        options: the options of the model's mechanism; a run with other options is not resumed.
        on_step: called with the epoch, the steps done in it, and mean loss and accuracy (percent) of the epoch so far:
            at the end of each epoch and at most ten times a second, as reading the numbers waits for the device.
        on_epoch: called with the record of each finished epoch, once it is on disk.
        accelerator: an accelerator from ``create_accelerator``, if the caller needs it too (None: create one).

    Raises:
        OptionError: the config makes no sense; nothing was done.
        ResumeError: the folder holds a different run; the message says what differs.
        DivergedError: the loss is not finite; the message says where.
    """
    need("training", "accelerate")
    config.check()
    accelerator = accelerator or create_accelerator(config)
    check_accelerator(accelerator, config)
    files = RunFolder(Path(folder))
    fingerprint = run_fingerprint(model, config, batches.steps_per_epoch, accelerator.num_processes)
    fingerprint |= {"options": dict(options)} if options else {}  # runs from before there were options do not have them
    finished = files.load_result(fingerprint)
    if finished is not None:
        model.to(accelerator.device).load_state_dict(files.load_weights())
        model.eval()
        return TrainResult.from_dict(finished)
    run = Run(model, batches, config, accelerator)
    try:
        go_through(run, config.epochs, files, fingerprint, config.precision, on_step=on_step, on_epoch=on_epoch)
        result = TrainResult.of(run.epochs)
        if accelerator.is_main_process:
            files.save_result(model, result.as_dict(), fingerprint)
        accelerator.wait_for_everyone()
    finally:
        run.close()
    return result


def go_through(
    run: Rounds[Record],
    rounds: int,
    files: RunFolder,
    fingerprint: dict[str, Any],
    precision: str,
    *,
    on_step: OnStep | None,
    on_epoch: Callable[[Record], None] | None,
) -> None:
    """Train all remaining rounds of ``run``; each writes a checkpoint and a line of the log."""
    main = run.accelerator.is_main_process
    checkpoint = files.load_checkpoint(fingerprint)
    if main:
        files.remove_halves()
    if checkpoint is not None:
        run.load_state_dict(checkpoint)
        if main:
            write_log(files.log, run.epochs)  # the log may have a round that the checkpoint does not

    def save() -> None:
        state = run.state_dict()
        if main:
            files.save_checkpoint({"fingerprint": fingerprint, **state})

    while run.epoch < rounds:
        with matrix_products(precision):
            record = run.train_epoch(on_step if main else None, save)
        save()
        if main:
            write_log(files.log, run.epochs)
        if on_epoch is not None and main:
            on_epoch(record)
    run.finish()
