"""Training runs on text: the network with its task, the state of a run, its steps, evaluations and records."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linattn.lab.tasks.text import Sequences, SequenceTask
from linattn.lab.train.meter import Reading
from linattn.lab.train.rounds import DivergedError, Rounds
from linattn.lab.train.text.config import TextConfig
from linattn.lab.train.text.feed import Feed, Part, Step
from linattn.support.schedule import SCHEDULES
from linattn.support.seeds import seed_step

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


@dataclass(frozen=True)
class StepRecord:
    """An evaluation on the test sequences after ``step`` steps."""

    step: int
    lr: float
    """Learning rate of the last step."""
    train_loss: float
    """Mean training loss in nats since the record before."""
    score: float
    """The metric by which models are compared on the task."""
    metrics: dict[str, float]
    """All metrics of the task; ``loss`` is in nats."""
    tokens: int
    """Tokens trained on so far, padding included."""
    seconds: float
    """Time of training alone since the record before; evaluation and files are not counted."""


@dataclass(frozen=True)
class TextResult:
    records: list[StepRecord]
    metric: str
    score: float
    """Score of the last step, not of the best: to pick a step by test data would be a leak."""
    seconds: float
    """Time of training alone over all steps, including those before a resume."""
    graphs: str = ""
    """Whether steps were CUDA graphs: ``replayed``, or ``stopped`` and why; empty if none were wanted."""
    validation: dict[str, float] | None = None
    """The metrics of the last step on other sequences, by which settings are chosen."""

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "TextResult":
        return cls(**content | {"records": [StepRecord(**record) for record in content["records"]]})

    @property
    def tokens_per_second(self) -> float:
        """Training speed over the whole run, including start-up and compilation."""
        return self.records[-1].tokens / max(self.seconds, 1e-9)


class TextDivergedError(DivergedError):
    """The loss is not finite; counts steps instead of epochs."""

    def __init__(self, step: int, lr: float, what: str = "training loss") -> None:
        RuntimeError.__init__(
            self,
            f"the {what} is not finite: step {step}, learning rate {lr:g}. "
            "A lower lr, more warmup_steps or a smaller clip_norm helps; checkpoint and log end before this step",
        )
        self.epoch, self.step, self.lr = 0, step, lr


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
        if self.task.kind == "classification":
            logits, targets = self.logits(batch), batch.targets
            logits = logits.reshape(targets.numel(), -1)
        else:
            hidden, targets = self._hidden(batch).flatten(0, 1), batch.targets
            logits = self.model.lm_head(hidden if rows is None else hidden[rows])
        targets = targets.flatten() if rows is None else targets.flatten()[rows]
        return self.task.training_sums(logits, targets)

    def logits(self, batch: Sequences) -> Tensor:
        """Logits at every place, as ``SequenceTask.score`` needs them."""
        if self.task.kind == "classification":
            found: Tensor = self.model(batch.inputs, attention_mask=batch.key_mask).logits
            return found
        return self.model.lm_head(self._hidden(batch))

    def _hidden(self, batch: Sequences) -> Tensor:
        out = self.model.model(
            batch.inputs, attention_mask=batch.key_mask, cu_seqlens=batch.cu_seqlens, use_cache=False
        )
        hidden: Tensor = out.last_hidden_state
        return hidden


if TYPE_CHECKING:
    from accelerate import Accelerator


@torch.no_grad()
def evaluate(
    network: TextNetwork, task: SequenceTask, batches: Iterable[Sequences], accelerator: "Accelerator"
) -> dict[str, float]:
    """The metrics of ``task`` over ``batches``, in the accelerator's precision; sets ``eval`` mode.

    Each process evaluates its share of the batches, all of the same kind; the result is over all processes.
    """
    network.eval()
    sums: dict[str, torch.Tensor] = {}
    for batch in batches:
        with accelerator.autocast():
            logits = network.logits(batch)
        for name, value in task.score(logits, batch).items():
            sums[name] = sums[name] + value if name in sums else value
    if accelerator.num_processes > 1:
        sums = _over_processes(sums, accelerator)
    return task.metrics({name: value.item() for name, value in sums.items()})


def _over_processes(sums: dict[str, torch.Tensor], accelerator: "Accelerator") -> dict[str, torch.Tensor]:
    """Add up sums over processes; a process without batches has none and gets their names from the others."""
    from accelerate.utils import gather_object  # type: ignore[import-untyped]

    found: dict[str, torch.Tensor] = {}
    for own in gather_object([{name: value.item() for name, value in sums.items()}]):
        for name, value in own.items():
            found[name] = found.get(name, torch.zeros((), dtype=torch.float64)) + value
    return found


if TYPE_CHECKING:
    from accelerate import Accelerator


class TextRun(Rounds[StepRecord]):
    """A run of rounds of steps over sequences; each round ends in an evaluation."""

    def __init__(self, network: TextNetwork, feed: Feed, config: TextConfig, accelerator: "Accelerator") -> None:
        super().__init__(network, config, accelerator)
        self.feed, self.config, self.language = feed, config, network
        self._going: Iterator[Step] | None = None

    @property
    def done(self) -> int:
        """Number of steps before this round."""
        return self.epoch * self.config.round_steps

    @property
    def steps(self) -> int:
        return min(self.config.round_steps, self.config.steps - self.done)

    def batches_from_here(self) -> Iterator[Step]:
        """One iterator for all rounds, so that batches made ahead are not lost at an evaluation."""
        if self._going is None:
            self._going = self.feed.train(self.done + self.step)
        return self._going

    def train_step(self, batches: Iterator[Step]) -> None:
        # The draws of a step (dropout) must depend only on its number.
        seed_step(self.config.seed, 0, self.done + self.step, self.accelerator.process_index)
        parts, total = next(batches)
        self.set_learning_rate()
        self.meter.count(sum(part.scored for part in parts))
        # Processes average their gradients, and the loss of each is a sum over its share of the scored targets.
        factor = self.accelerator.num_processes / max(total, 1)
        if self.captured is not None and parts[0].batch.cu_seqlens is not None:
            self.captured.stop("sequences laid end to end are cut elsewhere in every batch")
        if self.captured is None or self.captured.stopped is not None:
            self._update(parts, factor)
            return
        (part,) = parts
        batch, device = part.batch, self.accelerator.device
        self.apply(batch.inputs, batch.targets, batch.key_mask, part.rows, torch.full((), factor, device=device))

    def update(  # type: ignore[override]
        self, inputs: Tensor, targets: Tensor, key_mask: Tensor | None, rows: Tensor | None, factor: Tensor
    ) -> None:
        """A step of one part, from tensors alone; ``factor ()`` multiplies the summed loss."""
        self._update([Part(Sequences(inputs, targets, key_mask), rows, 0)], factor)

    def _update(self, parts: list[Part], factor: float | Tensor) -> None:
        config, accelerator = self.config, self.accelerator
        losses, right = [], []
        for number, part in enumerate(parts, 1):
            apart = number < len(parts) and accelerator.num_processes > 1
            with accelerator.no_sync(self.network) if apart else nullcontext():
                loss, hits = self.network(part.batch, part.rows)
                accelerator.backward(loss * factor)
            losses.append(loss.detach())
            right.append(hits)
        self.meter.add_sums(torch.stack(losses).sum(), torch.stack(right).sum())
        if config.clip_norm is not None:
            accelerator.clip_grad_norm_(self.network.parameters(), config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def learning_rate(self, step: int) -> float:
        config = self.config
        fall = SCHEDULES[config.schedule]
        return fall(self.done + step, config.steps, config.warmup_steps, config.lr, config.min_lr)

    def evaluate(self, reading: Reading, lr: float) -> StepRecord:
        task = self.feed.task
        metrics = evaluate(self.language, task, self.feed.test(task), self.accelerator)
        if not isfinite(metrics["loss"]):
            raise self.diverged(self.step, lr, "test loss")
        step = self.done + self.step
        tokens = step * self.config.batch_size * self.feed.task.length
        score = metrics[self.feed.task.metric]
        return StepRecord(step, lr, reading.loss, score, metrics, tokens, self.seconds)

    def record_of(self, fields: dict[str, Any]) -> StepRecord:
        return StepRecord(**fields)

    def diverged(self, step: int, lr: float, what: str = "training loss") -> DivergedError:
        return TextDivergedError(self.done + step, lr, what)

    def close(self) -> None:
        going = self._going
        if going is not None:
            going.close()  # type: ignore[attr-defined]  # a generator: its threads end with it
        super().close()
