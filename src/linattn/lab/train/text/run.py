"""Training runs on text: their state and their steps."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linattn.lab.tasks.text import Sequences
from linattn.lab.train.meter import Reading
from linattn.lab.train.rounds import DivergedError, Rounds
from linattn.lab.train.text.config import TextConfig
from linattn.lab.train.text.evaluate import evaluate
from linattn.lab.train.text.feed import Feed, Part, Step
from linattn.lab.train.text.network import TextNetwork
from linattn.lab.train.text.records import StepRecord, TextDivergedError
from linattn.support.schedule import SCHEDULES
from linattn.support.seeds import seed_step

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


class TextRun(Rounds[StepRecord]):
    """A run of rounds of steps over sequences; each round ends in an evaluation.

    With ``own_test`` it ends in two evaluations. The second, on the task's own test sequences, goes into
    ``own_records`` and has no other effect. ``own_records`` is None without it, and if its loss was not finite.
    """

    def __init__(
        self,
        network: TextNetwork,
        feed: Feed,
        config: TextConfig,
        accelerator: "Accelerator",
        own_test: bool = False,
    ) -> None:
        super().__init__(network, config, accelerator)
        self.feed, self.config, self.language = feed, config, network
        self.own_records: list[StepRecord] | None = [] if own_test else None
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
        record = self._evaluated(self.feed.test(), reading, lr)
        if not isfinite(record.metrics["loss"]):
            raise self.diverged(self.step, lr, "test loss")
        if self.own_records is not None:
            own = self._evaluated(self.feed.own_test(), reading, lr)
            # The result on other test sequences must not stop this run.
            self.own_records = [*self.own_records, own] if isfinite(own.metrics["loss"]) else None
        return record

    def _evaluated(self, batches: Iterable[Sequences], reading: Reading, lr: float) -> StepRecord:
        metrics = evaluate(self.language, batches, self.accelerator)
        step = self.done + self.step
        tokens = step * self.config.batch_size * self.feed.task.length
        score = metrics[self.feed.task.metric]
        return StepRecord(step, lr, reading.loss, score, metrics, tokens, self.seconds)

    def state_dict(self) -> dict[str, Any]:
        own = None if self.own_records is None else [asdict(record) for record in self.own_records]
        return super().state_dict() | {"own_records": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.own_records is not None:
            found = state.get("own_records", [])  # checkpoints of earlier versions do not have them
            complete = found is not None and len(found) == self.epoch
            self.own_records = [self.record_of(record) for record in found] if complete else None

    def record_of(self, fields: dict[str, Any]) -> StepRecord:
        return StepRecord(**fields)

    def diverged(self, step: int, lr: float, what: str = "training loss") -> DivergedError:
        return TextDivergedError(self.done + step, lr, what)

    def close(self) -> None:
        going = self._going
        if going is not None:
            going.close()  # type: ignore[attr-defined]  # a generator: its threads end with it
        super().close()
