"""Runs the epochs of a run. On a GPU the host runs ahead: it reads results in blocks and never waits for one step."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from linattn.lab.train.graph.config import GraphConfig
from linattn.lab.train.graph.objective import Objective
from linattn.lab.train.graph.optimizer import create_optimizer

BLOCK = 25  # evaluations between two reads of results from a GPU


@dataclass(frozen=True)
class GraphRecord:
    """One evaluation, on validation data. Test data is used only once, after the best epoch is chosen."""

    epoch: int
    """Counted from 0."""
    train_loss: float
    val_loss: float
    val: float
    """The score, in percent."""
    seconds: float
    """Time of the training steps since the last evaluation."""


OnEpoch = Callable[[GraphRecord], None]


class NotFiniteError(RuntimeError):
    """The training loss is not finite."""


class Best:
    """The weights of the best evaluation so far, chosen on the device by the score, or for equal scores the lower loss.

    After ``patience`` evaluations in a row without improvement the choice is final (0: never).
    """

    def __init__(self, model: nn.Module, patience: int) -> None:
        self.model, self.patience = model, patience
        self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        device = next(iter(self.weights.values())).device
        self.score, self.loss = (torch.full((), x, dtype=torch.float64, device=device) for x in (-torch.inf, torch.inf))
        self.waited = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def offer(self, score: Tensor, loss: Tensor) -> None:
        better = (score > self.score) | ((score == self.score) & (loss < self.loss))
        if self.patience:
            better = better & (self.waited < self.patience)
            self.waited = torch.where(better, 0, self.waited + 1)
        self.score, self.loss = torch.where(better, score, self.score), torch.where(better, loss, self.loss)
        for name, value in self.model.state_dict().items():
            self.weights[name] = torch.where(better, value, self.weights[name])


class Clock:
    """Measures the seconds of training steps; on a GPU by events of the device."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        self._began = self._now()

    def stop(self) -> None:
        self._spans.append((self._began, self._now()))

    def _now(self) -> Any:
        if not self.on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> Callable[[], float]:
        """A function that returns the seconds since the last ``take``; call it when the device has finished them."""
        spans, self._spans = self._spans, []
        if self.on_gpu:
            return lambda: sum(first.elapsed_time(last) for first, last in spans) / 1000
        return lambda: sum(last - first for first, last in spans)


def run_epochs(
    model: nn.Module, objective: Objective, config: GraphConfig, log: Path | None, on_epoch: OnEpoch
) -> tuple[list[GraphRecord], int, dict[str, Tensor]]:
    """Train. Returns all records, the index of the best, and the best weights on the CPU."""
    device = torch.device(config.device)
    optimizer = create_optimizer(model, config)
    draw = torch.Generator().manual_seed(config.seed)
    clock, best = Clock(device), Best(model, config.patience)
    block = BLOCK if clock.on_gpu else 1
    records: list[GraphRecord] = []
    waiting: list[tuple[int, Tensor, Callable[[], float]]] = []
    for epoch in range(config.epochs):
        clock.start()
        model.train()
        loss = objective.loss(model, draw)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        train_loss = loss.detach().double()
        clock.stop()
        if (epoch + 1) % config.eval_every and epoch + 1 < config.epochs:
            continue
        model.eval()
        with torch.no_grad():
            val_loss, scores = objective.evaluate(model, "val")
        val = scores[objective.metric]
        best.offer(val, val_loss)
        waiting.append((epoch, torch.stack([train_loss, val_loss, val]), clock.take()))
        if len(waiting) < block and epoch + 1 < config.epochs:
            continue
        numbers = torch.stack([found for _, found, _ in waiting]).tolist()  # waits for the device, once for each block
        for (at, _, seconds), (train, held_out, score) in zip(waiting, numbers, strict=True):
            if train - train != 0:
                raise NotFiniteError(f"the training loss is not finite: epoch {at}, lr {config.lr:g}; a lower lr helps")
            records.append(GraphRecord(at, train, held_out, score, seconds()))
            if log is not None:
                with log.open("a") as file:
                    file.write(dumps(asdict(records[-1])) + "\n")
            on_epoch(records[-1])
            if config.patience and len(records) - 1 - best_of(records) >= config.patience:
                return records, best_of(records), _on_cpu(best.weights)
        waiting = []
    return records, best_of(records), _on_cpu(best.weights)


def best_of(records: list[GraphRecord]) -> int:
    """The index of the best score; among equals the lower validation loss, then the first."""
    return max(range(len(records)), key=lambda i: (records[i].val, -records[i].val_loss))


def _on_cpu(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in weights.items()}
