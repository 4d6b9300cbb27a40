"""The training loop."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from linattn.support.extras import need
from linattn.train.accelerator import check_accelerator, create_accelerator, matrix_products
from linattn.train.checkpoint import ResumeError, RunFolder, run_fingerprint
from linattn.train.config import TrainConfig
from linattn.train.log import write_log
from linattn.train.records import DivergedError, EpochRecord, TrainResult
from linattn.train.rounds import OnStep, Record, Rounds
from linattn.train.run import Run

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    from linattn.train.batches import Batches

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
    """Train ``model``, or go on where the run in ``folder`` was stopped; a finished one is returned at once.

    Afterwards the model is in ``eval`` mode and holds the weights that were evaluated last: the averaged ones with
    ``ema_decay``, else its own; ``folder`` has them as ``weights.pt``, beside ``result.json`` and ``log.jsonl``.

    A step depends on the weights, the optimiser, the seed and its own number alone, so that a run that was killed and
    started again ends in the same weights as one that was not. For that the model must start the same: seed torch
    before it is made. On a CPU this holds to the last bit, on a GPU as far as its kernels add in a fixed order. Steps
    that are replayed as CUDA graphs draw the same random numbers as others, and a stopped run may go on with graphs or
    without: only the learning rate is rounded to fp32 in the one and not in the other.

    Args:
        model: images ``(b, C, H, W)`` to logits ``(b, classes)``.
        batches: of ``linattn.train.batches.create_batches``, on the device of the config, this process's share.
        folder: of this run alone.
        options: that the model's mechanism was given: a run with others is not gone on with.
        on_step: called with epoch, steps done in it, mean loss and accuracy (percent) of the epoch so far; at most
            ten times a second, as the numbers must be waited for, and at the end of each epoch.
        on_epoch: called with each finished epoch's record, when it is on disk.
        accelerator: of ``create_accelerator``, where the caller needs it too (None: made here).

    Raises:
        OptionError: the config makes no sense; nothing was done.
        ResumeError: the folder holds another run; says what differs.
        DivergedError: the loss is not finite; says where.
    """
    need("training", "accelerate")
    config.check()
    accelerator = accelerator or create_accelerator(config)
    check_accelerator(accelerator, config)
    files = RunFolder(Path(folder))
    fingerprint = run_fingerprint(model, config, batches.steps_per_epoch, accelerator.num_processes)
    fingerprint |= {"options": dict(options)} if options else {}  # runs that are older than options do not name them
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
    """All rounds of ``run``, or those that are left of it: each leaves a checkpoint and a line in the log."""
    main = run.accelerator.is_main_process
    checkpoint = files.load_checkpoint(fingerprint)
    if main:
        files.remove_halves()
    if checkpoint is not None:
        run.load_state_dict(checkpoint)
        if main:
            write_log(files.log, run.epochs)  # it may know a round that the checkpoint does not

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
