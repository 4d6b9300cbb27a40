"""Trains a language model on a sequence task, in a folder that ends as a checkpoint of transformers."""

import os
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linattn.lab.tasks.text import IGNORED, Sequences, SequenceTask
from linattn.lab.train.accelerator import create_accelerator
from linattn.lab.train.rounds import OnStep, Plan, Reading, Rounds, complete
from linattn.lab.train.text.config import TextConfig
from linattn.lab.train.text.feed import Feed, Part, Step
from linattn.lab.train.text.hosts import WEIGHTS
from linattn.support.checkpoint import ResumeError, RunFolder, model_digest
from linattn.support.extras import need
from linattn.support.progress import OnWork, in_silence, without_bars

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


@dataclass(frozen=True)
class StepRecord:
    """An evaluation on the test sequences after ``step`` steps and ``tokens`` tokens, padding included.

    ``lr`` is the learning rate of the last step, ``train_loss`` the mean in nats since the record before, ``seconds``
    the time of training alone since then, ``score`` the metric by which models are compared on the task, and
    ``metrics`` are all that the task has; ``loss`` is in nats.
    """

    step: int
    lr: float
    train_loss: float
    score: float
    metrics: dict[str, float]
    tokens: int
    seconds: float


@dataclass(frozen=True)
class TextResult:
    """All evaluations, the score of the last one (of the best it would be a leak), and the time of training alone.

    ``graphs``: whether steps were CUDA graphs: ``replayed``, or ``stopped`` and why; empty if none were wanted.
    ``validation``: the metrics of the last step on other sequences, by which settings are chosen.
    """

    records: list[StepRecord]
    metric: str
    score: float
    seconds: float
    graphs: str = ""
    validation: dict[str, float] | None = None


class TextNetwork(nn.Module):
    """A model with its task: ``forward`` returns the summed loss of the scored targets and how many of them are hit.

    ``model`` is one of ``linattn.models.language``, with the head that fits the task. Logits are computed only where
    something is scored: for a long sequence with few answers, all logits would cost more than the model.
    """

    dynamic_shapes = None
    """Torch decides which shapes of compiled blocks vary: numbers of documents do, and tests may be longer."""

    def __init__(self, model: Any, task: SequenceTask) -> None:
        super().__init__()
        self.model, self.task = model, task

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of the model, which are compiled one by one."""
        layers: nn.ModuleList = self.model.model.layers
        return layers

    def forward(self, batch: Sequences, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Summed loss and hits. ``rows``: indices of the scored targets among all ``B T``; None: all are scored."""
        targets = batch.targets.flatten() if rows is None else batch.targets.flatten()[rows]
        return self.task.training_sums(self.logits(batch, rows).reshape(len(targets), -1), targets)

    def logits(self, batch: Sequences, rows: Tensor | None = None) -> Tensor:
        """Logits at every place, as ``SequenceTask.score`` needs them, or at those of ``rows``."""
        if self.task.kind == "classification":
            found: Tensor = self.model(batch.inputs, attention_mask=batch.key_mask).logits
            return found
        given = {"attention_mask": batch.key_mask, "cu_seqlens": batch.cu_seqlens, "use_cache": False}
        hidden: Tensor = self.model.model(batch.inputs, **given).last_hidden_state
        return self.model.lm_head(hidden if rows is None else hidden.flatten(0, 1)[rows])


@torch.no_grad()
def evaluate(
    network: TextNetwork, task: SequenceTask, batches: Iterable[Sequences], accelerator: "Accelerator"
) -> dict[str, float]:
    """The metrics of ``task`` over ``batches``, in the accelerator's precision; sets ``eval`` mode.

    Each process evaluates its share of the batches, all of the same kind; the result is over all processes.
    """
    from accelerate.utils import gather_object  # type: ignore[import-untyped]

    network.eval()
    own: dict[str, Tensor] = {}
    for batch in batches:
        with accelerator.autocast():
            logits = network.logits(batch)
        for name, value in task.score(logits, batch).items():
            own[name] = own[name] + value if name in own else value
    sums: dict[str, float] = {}
    # A process without batches gets the names from the others.
    for part in gather_object([{name: value.item() for name, value in own.items()}]):
        for name, number in part.items():
            sums[name] = sums.get(name, 0) + number
    return task.metrics(sums)


class TextRun(Rounds[StepRecord]):
    """A run of rounds of steps over sequences; each round ends in an evaluation."""

    named = "step {1}"

    def __init__(
        self,
        network: TextNetwork,
        feed: Feed,
        config: TextConfig,
        accelerator: "Accelerator",
        validation: SequenceTask | None = None,
    ) -> None:
        plan = Plan(config.round_steps, config.steps, config.warmup_steps, config.schedule)
        super().__init__(network, config, accelerator, plan, StepRecord)
        self.language, self.feed, self.validation = network, feed, validation

    def place(self, step: int) -> tuple[int, int]:
        return 0, self.done + step

    def batches_from_here(self) -> Generator[Step, None, None]:
        return self.feed.train(self.done + self.step)

    def take(self, batch: Step) -> None:
        parts, total = batch
        # Processes average their gradients, and the loss of each is a sum over its share of the scored targets.
        factor = self.accelerator.num_processes / max(total, 1)
        inputs, rows = parts[0].batch, parts[0].rows
        if self.captured is not None and inputs.cu_seqlens is not None:
            self.captured.stop("sequences laid end to end are cut elsewhere in every batch")
        if self.captured is None or self.captured.stopped is not None:
            super().update(parts, factor)
        else:
            multiplied = torch.full((), factor, device=self.accelerator.device)
            self.captured(inputs.inputs, inputs.targets, inputs.key_mask, rows, multiplied)

    def update(self, *inputs: Any) -> None:
        """A step of one part, from tensors alone; the last one multiplies the summed loss."""
        *sequences, rows, factor = inputs
        super().update([Part(Sequences(*sequences), rows)], factor)

    def backward(self, parts: list[Part], factor: float | Tensor) -> Tensor:
        losses, hits, scored = [], [], []
        for number, (batch, rows) in enumerate(parts, 1):
            apart = number < len(parts) and self.accelerator.num_processes > 1
            with self.accelerator.no_sync(self.network) if apart else nullcontext():
                loss, right = self.network(batch, rows)
                self.accelerator.backward(loss * factor)
            losses.append(loss.detach())
            hits.append(right)
            scored.append((batch.targets != IGNORED).sum())
        return torch.stack([torch.stack(values).sum().double() for values in (losses, hits, scored)])

    def evaluate(self, reading: Reading, lr: float) -> StepRecord:
        task, step = self.feed.task, self.done + self.step
        metrics = evaluate(self.language, task, self.feed.test(task), self.accelerator)
        self.check_finite(metrics["loss"], "test loss")
        tokens = step * self.config.batch_size * task.length
        return StepRecord(step, lr, reading.loss, metrics[task.metric], metrics, tokens, self.seconds)

    def result(self) -> TextResult:
        other, chosen_by = self.validation, None
        if other is not None:
            chosen_by = evaluate(self.language, other, self.feed.test(other), self.accelerator)
        graphs = "" if self.captured is None else self.captured.status
        seconds = sum(record.seconds for record in self.records)
        return TextResult(self.records, self.feed.task.metric, self.records[-1].score, seconds, graphs, chosen_by)


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

    def save_weights(self, model: Any) -> None:
        """Write all files of a ``TextNetwork`` aside and move them into place; the result, which marks a finished run,
        comes later."""
        if not self.keep_weights:
            return
        tokenizer = getattr(getattr(model.task, "encoder", None), "tokenizer", None)
        self.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.path, prefix=".model-") as aside, without_bars():
            for saved in (model.model, tokenizer):
                if saved is not None:
                    saved.save_pretrained(aside)
            for file in sorted(Path(aside).iterdir()):
                os.replace(file, self.path / file.name)

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
    """Train ``model``, or resume the run in ``folder``, as :func:`linattn.lab.train.loop.train` does with images.

    For the same first weights, create the model with ``linattn.lab.train.text.hosts.create_host``, or seed torch
    before. Afterwards ``folder`` is a checkpoint for ``from_pretrained`` and ``linattn generate``.

    Args:
        model: a model of ``linattn.models.language``, with the head that the task's kind needs.
        validation: a task whose test sequences are evaluated after the last step, too, to choose settings by.
        start: the origin of the first weights, if they are not random; a resumed run must name the same.
        keep_weights: False keeps no weights, only result and log; a run that is already finished then leaves ``model``
            as it is.
        on_step: called with the round, the steps done in it, and mean loss and accuracy (percent) of the round so far.
        on_work: called with a description of work before the first step that takes long.
    """
    need("training a language model", "accelerate", "transformers", "safetensors")
    accelerator = accelerator or create_accelerator(config)
    network, files = TextNetwork(model, task), TextFolder(Path(folder), keep_weights)
    fingerprint = config.values(affecting=True) | {
        "device": config.device.split(":")[0], "model": model_digest(model), "task": task.identity(),
        "validation": None if validation is None else validation.identity(), "start": start,
        "processes": accelerator.num_processes,
        # The printed form of a model does not show all options: for instance a cap, or the first value of parameters.
        "options": model.config.mechanism_options
    }  # fmt: skip
    finished = files.load_result(fingerprint)
    if finished is not None:
        model.to(accelerator.device).eval()
        if keep_weights:
            model.load_state_dict(files.load_weights(), strict=not model.config.tie_word_embeddings)
        return TextResult(**finished | {"records": [StepRecord(**record) for record in finished["records"]]})
    task.prepare(on_work)
    if validation is not None:
        validation.prepare(on_work, train=False)
    rank, processes = accelerator.process_index, accelerator.num_processes
    feed = Feed(task, config, accelerator.device, rank=rank, processes=processes)
    run = TextRun(network, feed, config, accelerator, validation)
    result: TextResult = complete(run, files, fingerprint, on_step=on_step, on_record=on_record)
    return result
