"""Measurements of a trained stack: its risk beside that of the formula's predictor, and the step it has learnt."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from linattn.lab.theory.icl.data.base import Optimum
from linattn.lab.theory.icl.tasks import TaskStream
from linattn.lab.theory.icl.train import predict


class Risks(NamedTuple):
    """Means over the same test tasks ``(M,)``, in units of the labels' variance; ``error`` is the standard error of the
    first one."""

    trained: Tensor
    error: Tensor
    formula: Tensor


@torch.no_grad()
def measure_risks(stack: nn.Module, stream: TaskStream, optima: list[Optimum], tasks: int, batch: int) -> Risks:
    """Measure the risks of the models and of ``optima``, which belong to the stream's cells."""
    W, w = _predictors(optima, stream)
    sums = torch.zeros(3, len(optima), dtype=torch.float64, device=W.device)
    drawn = 0
    while drawn < tasks:
        tokens, answers = stream.draw(min(batch, tasks - drawn))
        trained = (predict(stack, tokens, stream.counts) - answers).double().square()
        x, y = tokens[:, :, :-1, :-1], tokens[:, :, :-1, -1]
        gradient = ((w.unsqueeze(1) * y).unsqueeze(2) @ x).squeeze(2)  # (M, B, d)
        formula = ((tokens[:, :, -1, :-1] @ W) * gradient).sum(-1)
        sums += torch.stack([trained, trained.square(), (formula - answers).double().square()]).sum(2)
        drawn += answers.shape[1]
    mean, square, formula = sums / drawn
    return Risks(mean, ((square - mean**2).clamp(min=0) / drawn).sqrt(), formula)


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


def step_errors(steps: Tensor, optima: list[Optimum]) -> list[float]:
    """Relative distances ``|W w - W* w*|_F / |W* w*|_F`` over all examples of a model."""
    errors = []
    for own, optimum in zip(steps.double().cpu(), optima, strict=True):
        n = len(optimum.weights)
        wanted = optimum.weights[:, None, None] * optimum.preconditioner
        errors.append(((own[own.shape[0] - n :] - wanted).norm() / wanted.norm()).item())
    return errors


def _predictors(optima: list[Optimum], stream: TaskStream) -> tuple[Tensor, Tensor]:
    """W ``(M, d, d)`` and w ``(M, n)`` of the optima, with zeros where tokens are padding."""
    w = torch.zeros(len(optima), stream.most, dtype=torch.float64)
    for row, optimum in zip(w, optima, strict=True):
        row[stream.most - len(optimum.weights) :] = optimum.weights
    W = torch.stack([optimum.preconditioner for optimum in optima])
    return W.float().to(stream.counts.device), w.float().to(stream.counts.device)
