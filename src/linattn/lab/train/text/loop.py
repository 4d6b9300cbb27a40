"""Trains a language model on a sequence task, in a folder that ends as a checkpoint of transformers."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from linattn.lab.tasks.text import SequenceTask
from linattn.lab.train.accelerator import check_accelerator, create_accelerator, matrix_products
from linattn.lab.train.rounds import OnStep, go_through
from linattn.lab.train.text.config import TextConfig
from linattn.lab.train.text.feed import Feed
from linattn.lab.train.text.hosts import WEIGHTS
from linattn.lab.train.text.run import StepRecord, TextNetwork, TextResult, TextRun, evaluate
from linattn.support.checkpoint import ResumeError, RunFolder, model_digest
from linattn.support.extras import need
from linattn.support.progress import OnWork, in_silence, without_bars

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


@dataclass(frozen=True)
class TextFolder(RunFolder):
    """A folder with ``config.json`` and ``model.safetensors`` for ``from_pretrained``, ``result.json`` and the log."""

    keep_weights: bool = True
    """False: a finished run leaves only its result and its log."""

    @property
    def weights(self) -> Path:
        return self.path / WEIGHTS

    def remove_halves(self) -> None:
        super().remove_halves()
        for half in self.path.glob(".model-*"):
            rmtree(half, ignore_errors=True)

    def save_weights(self, model: nn.Module) -> None:
        """Write all files aside and then move them into place; the result, which marks a finished run, comes later."""
        if not self.keep_weights:
            return
        network: Any = model  # a TextNetwork
        tokenizer = getattr(getattr(network.task, "encoder", None), "tokenizer", None)
        self.path.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=self.path, prefix=".model-"))
        try:
            with without_bars():
                network.model.save_pretrained(aside)
                if tokenizer is not None:
                    tokenizer.save_pretrained(aside)
            for file in sorted(aside.iterdir()):
                os.replace(file, self.path / file.name)
        finally:
            rmtree(aside, ignore_errors=True)

    def load_weights(self) -> dict[str, Tensor]:
        """The weights for ``load_state_dict`` of the language model; tied weights appear once."""
        from safetensors.torch import load_file

        if not self.weights.exists():
            raise ResumeError(f"{self.path} holds a finished run without its weights; train into another folder")
        return load_file(self.weights)


def train_text(
    model: Any,
    task: SequenceTask,
    config: TextConfig,
    folder: Path,
    *,
    validation: SequenceTask | None = None,
    start: str | None = None,
    keep_weights: bool = True,
    on_step: OnStep | None = None,
    on_record: Callable[[StepRecord], None] | None = None,
    on_work: OnWork = in_silence,
    accelerator: "Accelerator | None" = None,
) -> TextResult:
    """Train ``model``, or resume the run in ``folder`` where it was stopped; a finished run is returned at once.

    A step depends only on the weights, the optimiser, the seed and its own number, so that a run that was killed and
    resumed ends in the same weights as one that was not; on a GPU as far as its kernels add in a fixed order. For that
    the model must have the same first weights: create it with ``linattn.lab.train.text.hosts.create_host``, or seed
    torch before. Afterwards the model is in ``eval`` mode, and ``folder`` is a checkpoint for ``from_pretrained`` and
    ``linattn generate``.

    Args:
        model: a model of ``linattn.models.language``, with the head that the task's kind needs.
        folder: a folder for this run alone.
        validation: a task whose test sequences are evaluated after the last step, too, to choose settings by.
        start: the origin of the first weights, if they are not random; a resumed run must name the same.
        keep_weights: False keeps no weights, only result and log; a run that is already finished then leaves ``model``
            as it is.
        on_step: called with the round, the steps done in it, and mean loss and accuracy (percent) of the round so far.
        on_record: called with the record of each evaluation, once it is on disk.
        on_work: called with a description of work before the first step that takes long.
        accelerator: an accelerator from ``create_accelerator``, if the caller needs it too (None: create one).

    Raises:
        ResumeError: the folder holds a different run; the message says what differs.
        DivergedError: the loss is not finite; the message says where.
    """
    need("training a language model", "accelerate", "transformers", "safetensors")
    accelerator = accelerator or create_accelerator(config)
    check_accelerator(accelerator, config)
    network, files = TextNetwork(model, task), TextFolder(Path(folder), keep_weights)
    fingerprint = config.values(affecting=True) | {
        "device": config.device.split(":")[0], "model": model_digest(model), "task": task.identity(),
        "validation": None if validation is None else validation.identity(), "start": start,
        "processes": accelerator.num_processes,
        # The printed form of a model does not show all options: for instance a cap, or the first value of parameters.
        "options": model.config.mechanism_options,
    }  # fmt: skip
    finished = files.load_result(fingerprint)
    if finished is not None:
        model.to(accelerator.device).eval()
        if keep_weights:
            model.load_state_dict(files.load_weights(), strict=not model.config.tie_word_embeddings)
        return TextResult.from_dict(finished)
    task.prepare(on_work)
    if validation is not None:
        validation.prepare(on_work, train=False)
    rank, processes = accelerator.process_index, accelerator.num_processes
    feed = Feed(task, config, accelerator.device, rank=rank, processes=processes)
    run = TextRun(network, feed, config, accelerator)
    try:
        go_through(run, config.rounds, files, fingerprint, config.precision, on_step=on_step, on_epoch=on_record)
        chosen_by = None
        if validation is not None:
            with matrix_products(config.precision):
                chosen_by = evaluate(network, validation, feed.test(validation), accelerator)
        graphs = ""
        if run.captured is not None:
            graphs = "replayed" if run.captured.stopped is None else f"stopped: {run.captured.stopped}"
        seconds = sum(record.seconds for record in run.epochs)
        result = TextResult(run.epochs, task.metric, run.epochs[-1].score, seconds, graphs, chosen_by)
        if accelerator.is_main_process:
            files.save_result(network, asdict(result), fingerprint)
        accelerator.wait_for_everyone()
    finally:
        run.close()
    return result
