"""Tasks for a stack of models, their training, and what is measured of trained ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from linattn.lab.cases import Work
from linattn.lab.theory.icl.curves import Curve
from linattn.lab.theory.icl.data import DataModel, Optimum
from linattn.lab.theory.icl.models import AdaptedStack, LinearStack, make_stack

WARM_UP = 0.05  # share of all steps


@dataclass(frozen=True, eq=False)
class Cell:
    """One model of a stack: a curve, a number of examples, and which of several equal runs this is."""

    curve: Curve
    n: int
    seed: int


class TaskStream:
    """Fresh tasks for the cells, in their order; all cells of a curve must be adjacent.

    Tasks with fewer examples than the largest number have zeros in front. With ``sources`` tasks come from the data
    that a curve was trained on before.
    """

    def __init__(self, cells: Sequence[Cell], generator: torch.Generator, *, sources: bool = False) -> None:
        self.cells, self.generator = cells, generator
        self.most = max(cell.n for cell in cells)
        self.groups: list[tuple[DataModel, int]] = []  # data, number of cells
        for cell in cells:
            data = (cell.curve.source or cell.curve.data) if sources else cell.curve.data
            if self.groups and self.groups[-1][0] is data:
                self.groups[-1] = data, self.groups[-1][1] + 1
            else:
                self.groups.append((data, 1))
        self.width = self.groups[0][0].d + 1
        self.counts = torch.tensor([cell.n for cell in cells], device=generator.device)
        place = torch.arange(self.most, device=generator.device)
        self.real = (place >= self.most - self.counts.unsqueeze(1))[:, None, :, None].float()  # (M, 1, n, 1)

    def draw(self, batch: int) -> tuple[Tensor, Tensor]:
        """Tokens ``(M, B, T, d+1)`` and answers ``(M, B)``; labels are in units of their standard deviation."""
        M, T = len(self.cells), self.most + 1
        tokens = torch.zeros(M, batch, T, self.width, device=self.generator.device)
        answers = torch.empty(M, batch, device=self.generator.device)
        begin = 0
        for data, count in self.groups:
            rows = slice(begin, begin + count)
            drawn = data.sample((count, batch), self.most, self.generator)
            unit = data.power**-0.5
            torch.mul(drawn.x, self.real[rows], out=tokens[rows, :, :-1, :-1])
            torch.mul(drawn.y * unit, self.real[rows].squeeze(-1), out=tokens[rows, :, :-1, -1])
            tokens[rows, :, -1, :-1] = drawn.query
            answers[rows] = drawn.answer * unit
            begin += count
        return tokens, answers


# Training.


def trained(config: Mapping[str, Any], family: str, model: str, cells: Sequence[Cell], work: Work) -> nn.Module:
    """The stack of a unit after training; an update's base is trained first."""
    drawn = generator(config, "train", family, model)
    stream, width, count = TaskStream(cells, drawn), config["d"] + 1, len(cells)
    ranks = [cell.curve.rank or 0 for cell in cells]
    settings = config["steps"], config["batch"], config["lr"]
    if family == "low-rank-update":
        base = LinearStack(count, width, drawn)
        fit(base, TaskStream(cells, drawn, sources=True), *settings, lambda share: work.tell(share / 2, "before"))
        stack: nn.Module = AdaptedStack(base, width, drawn, ranks)
        fit(stack, stream, *settings, lambda share: work.tell((1 + share) / 2, "update"))
        return stack
    if family == "low-rank":
        stack = LinearStack(count, width, drawn, ranks)
    else:
        stack = make_stack(model, count, width, stream.most + 1, drawn)
    fit(stack, stream, *settings, lambda share: work.tell(share, ""))
    return stack


def generator(config: Mapping[str, Any], *names: str) -> torch.Generator:
    seed = crc32(" ".join(names).encode()) + (config["seed"] << 32)
    return torch.Generator(device=config["device"]).manual_seed(seed)


def fit(
    stack: nn.Module, stream: TaskStream, steps: int, batch: int, lr: float, tell: Callable[[float], None] | None = None
) -> None:
    """``steps`` of ``batch`` tasks per model; the learning rate rises, then falls as a cosine to 0."""
    parameters = [p for p in stack.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    for step in range(steps):
        tokens, answers = stream.draw(batch)
        # A sum over models: each model's gradient is that of its own loss.
        loss = (predict(stack, tokens, stream.counts) - answers).square().mean(1).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if tell is not None:
            tell((step + 1) / steps)


def predict(stack: nn.Module, tokens: Tensor, counts: Tensor) -> Tensor:
    """Answers ``(M, B)``: the model's sum over examples, divided by their number, so that weights are of order 1."""
    answers: Tensor = stack(tokens) / counts.unsqueeze(1)
    return answers


def rate(step: int, steps: int) -> float:
    """Factor of the learning rate at a step, counted from 0."""
    rise = max(round(WARM_UP * steps), 1)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + cos(pi * (step - rise) / max(steps - rise, 1)))


# Measurement.


@torch.no_grad()
def measure_risks(
    stack: nn.Module, stream: TaskStream, optima: Sequence[Optimum], tasks: int, batch: int
) -> tuple[list[float], list[float], list[float]]:
    """Risks of the models, their standard errors, and risks of the ``optima``, which belong to the stream's cells.

    They are means over the same test tasks, in units of the labels' variance.
    """
    W, w = _predictors(optima, stream)
    sums = torch.zeros(3, len(optima), dtype=torch.float64, device=W.device)
    drawn = 0
    while drawn < tasks:
        tokens, answers = stream.draw(min(batch, tasks - drawn))
        errors = (predict(stack, tokens, stream.counts) - answers).double().square()
        x, y = tokens[:, :, :-1, :-1], tokens[:, :, :-1, -1]
        gradient = ((w.unsqueeze(1) * y).unsqueeze(2) @ x).squeeze(2)  # (M, B, d)
        formula = ((tokens[:, :, -1, :-1] @ W) * gradient).sum(-1)
        sums += torch.stack([errors, errors.square(), (formula - answers).double().square()]).sum(2)
        drawn += answers.shape[1]
    mean, square, formula = sums / drawn
    return mean.tolist(), ((square - mean**2).clamp(min=0) / drawn).sqrt().tolist(), formula.tolist()


@torch.no_grad()
def learnt_steps(stack: nn.Module, stream: TaskStream) -> Tensor:
    """``W w_i`` in the models' answers, ``(M, n, d, d)``: the coefficient of ``x_a x_ib y_i`` in ``f``, for each i.

    A single example ``(+-e_b, +-1)`` is put at place i and the query is ``e_a``; the part of the answer that is odd in
    both signs is the coefficient. This does not depend on how a model factorises W.
    """
    M, d, T = len(stream.cells), stream.width - 1, stream.most + 1
    device = stream.counts.device
    unit = torch.eye(d, device=device)
    signs = torch.tensor([(1.0, 1.0), (1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0)], device=device)
    found = torch.empty(M, T - 1, d, d, device=device)
    for place in range(T - 1):
        tokens = torch.zeros(4, d, d, T, d + 1, device=device)  # signs, a, b
        tokens[..., -1, :-1] = unit.unsqueeze(1)
        tokens[..., place, :-1] = signs[:, :1, None, None] * unit
        tokens[..., place, -1] = signs[:, 1:, None]
        answers = predict(stack, tokens.flatten(0, 2).expand(M, -1, -1, -1), stream.counts).view(M, 4, d, d)
        found[:, place] = (answers * signs.prod(1)[:, None, None]).sum(1) / 4
    return found


def step_errors(steps: Tensor, optima: Sequence[Optimum]) -> list[float]:
    """Relative distances ``|W w - W* w*|_F / |W* w*|_F`` over all examples of a model."""
    errors = []
    for own, optimum in zip(steps.double().cpu(), optima, strict=True):
        wanted = optimum.weights[:, None, None] * optimum.preconditioner
        errors.append(((own[len(own) - len(optimum.weights) :] - wanted).norm() / wanted.norm()).item())
    return errors


def _predictors(optima: Sequence[Optimum], stream: TaskStream) -> tuple[Tensor, Tensor]:
    """W ``(M, d, d)`` and w ``(M, n)`` of the optima, with zeros where tokens are padding."""
    w = torch.zeros(len(optima), stream.most, dtype=torch.float64)
    for row, optimum in zip(w, optima, strict=True):
        row[stream.most - len(optimum.weights) :] = optimum.weights
    W = torch.stack([optimum.preconditioner for optimum in optima])
    return W.float().to(stream.counts.device), w.float().to(stream.counts.device)
