"""The training loop for language models on sequence tasks."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linattn.lab.tasks.text import SequenceTask
from linattn.lab.tasks.text.task import PLACES
from linattn.lab.train.accelerator import check_accelerator, create_accelerator
from linattn.lab.train.captured_step import CapturedStep
from linattn.lab.train.rounds import OnStep, go_through, write_log
from linattn.lab.train.text.config import TextConfig
from linattn.lab.train.text.feed import Feed
from linattn.lab.train.text.folder import TextFolder
from linattn.lab.train.text.network import TextNetwork
from linattn.lab.train.text.records import StepRecord, TextResult
from linattn.lab.train.text.run import TextRun
from linattn.support.checkpoint import model_digest
from linattn.support.extras import need
from linattn.support.telling import OnWork, in_silence

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


def train_text(
    model: Any,
    task: SequenceTask,
    config: TextConfig,
    folder: Path,
    *,
    test: SequenceTask | None = None,
    own_test: Path | None = None,
    start: str | None = None,
    keep_weights: bool = True,
    on_step: OnStep | None = None,
    on_record: Callable[[StepRecord], None] | None = None,
    on_work: OnWork = in_silence,
    accelerator: "Accelerator | None" = None,
) -> TextResult:
    """Train ``model``, or resume the run in ``folder`` where it was stopped; a finished run is returned at once.

    A step depends only on the weights, the optimiser, the seed and its own number, so that a run that was killed and
    resumed ends in the same weights as one that was not; for the precision of this on a GPU see
    ``linattn.lab.train.loop.train``. For that the model must have the same first weights: create it with
    ``linattn.lab.train.text.hosts.create_host``, or seed torch before. Afterwards the model is in ``eval`` mode, and
    ``folder`` is a checkpoint for ``from_pretrained`` and ``linattn generate``.

    Args:
        model: a model of ``linattn.models.language``, with the head that the task's kind needs.
        folder: a folder for this run alone.
        test: a task whose test sequences are evaluated in place of those of ``task``, to choose settings by.
        own_test: only with ``test``: a folder for the files, except weights, that the same run without ``test`` would
            write. The test sequences of ``task`` are then evaluated too. They decide nothing; if their loss is not
            finite, the folder stays empty.
        start: the origin of the first weights, if they are not random; a resumed run must name the same.
        keep_weights: False keeps no weights, only result and log; a run that is already finished then leaves ``model``
            as it is.
        on_step: called with the round, the steps done in it, and mean loss and accuracy (percent) of the round so far.
        on_record: called with the record of each evaluation, once it is on disk.
        on_work: called with a description of work before the first step that takes long.
        accelerator: an accelerator from ``create_accelerator``, if the caller needs it too (None: create one).

    Raises:
        OptionError: the config makes no sense; nothing was done.
        ResumeError: the folder holds a different run; the message says what differs.
        DivergedError: the loss is not finite; the message says where.
    """
    need("training a language model", "accelerate", "transformers", "safetensors")
    config.check()
    accelerator = accelerator or create_accelerator(config)
    check_accelerator(accelerator, config)
    network, files = TextNetwork(model, task), TextFolder(Path(folder), keep_weights)
    processes = accelerator.num_processes
    fingerprint = text_fingerprint(model, task, config, processes, test=test, start=start)
    finished = files.load_result(fingerprint)
    if finished is not None:
        model.to(accelerator.device).eval()
        if keep_weights:
            model.load_state_dict(files.load_weights(), strict=not model.config.tie_word_embeddings)
        return TextResult.from_dict(finished)
    task.prepare(on_work, test=test is None or own_test is not None)
    if test is not None:
        test.prepare(on_work, train=False)
    feed = Feed(task, config, accelerator.device, rank=accelerator.process_index, processes=processes, test=test)
    run = TextRun(network, feed, config, accelerator, own_test is not None)
    try:
        go_through(run, config.rounds, files, fingerprint, config.precision, on_step=on_step, on_epoch=on_record)
        graphs = graph_words(run.captured)
        result = TextResult.of(run.epochs, task.metric, graphs)
        if accelerator.is_main_process:
            if own_test is not None and run.own_records is not None:  # first: a run with a result is not resumed
                own, other = (
                    TextFolder(own_test, keep_weights=False),
                    TextResult.of(run.own_records, task.metric, graphs),
                )
                own.remove_halves()
                write_log(own.log, other.records)
                own.save_result(network, other.as_dict(), fingerprint | {"test": None})
            files.save_result(network, result.as_dict(), fingerprint)
        accelerator.wait_for_everyone()
    finally:
        run.close()
    return result


def text_fingerprint(
    model: Any,
    task: SequenceTask,
    config: TextConfig,
    processes: int = 1,
    *,
    test: SequenceTask | None = None,
    start: str | None = None,
) -> dict[str, Any]:
    """Everything that a run must have in common with the one it resumes, ready for JSON."""
    return config.fingerprint() | {
        "model": model_digest(model), "task": task_settings(task), "processes": processes,
        "test": None if test is None else task_settings(test), "start": start, "options": _options(model.config),
        "data": task.content,
    }  # fmt: skip


def _options(config: Any) -> Any:
    """The options of the mechanisms, as one dict if they are the same in all layers.

    The printed form of a model does not show all of them: for instance a cap, or the first value of parameters.
    """
    given = config.mechanism_options or {}
    return given[0] if isinstance(given, list) and all(own == given[0] for own in given) else given


def graph_words(captured: CapturedStep | None) -> str:
    """The text for ``TextResult.graphs`` of a run."""
    if captured is None:
        return ""
    return "replayed" if captured.stopped is None else f"stopped: {captured.stopped}"


def task_settings(task: SequenceTask) -> dict[str, Any]:
    """What identifies a task, ready for JSON: its name, shape and settings, except where it keeps data.

    Example:
        >>> from linattn.lab.tasks.text import text_task
        >>> task_settings(text_task("mqar", vocab=64))["vocab"]
        64
    """
    found: dict[str, Any] = {"name": task.name, "vocabulary": task.vocabulary, "length": task.length}
    if is_dataclass(task):
        named = [field.name for field in fields(task) if field.init and field.name not in PLACES]
        plain = {name: getattr(task, name) for name in named}
        found |= {name: _plain(value) for name, value in plain.items()}
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
