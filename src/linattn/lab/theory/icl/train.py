"""Training of a stack: Adam on fresh tasks at every step. The models of a stack do not affect each other."""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi

import torch
from torch import Tensor, nn

from linattn.lab.theory.icl.tasks import TaskStream

WARM_UP = 0.05  # share of all steps


@dataclass(frozen=True)
class Recipe:
    """``steps`` of ``batch`` tasks per model; the learning rate rises, then falls as a cosine to 0."""

    steps: int
    batch: int
    lr: float


def fit(stack: nn.Module, stream: TaskStream, recipe: Recipe, on_step: Callable[[], None] = lambda: None) -> None:
    parameters = [p for p in stack.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=recipe.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, recipe.steps))
    for _ in range(recipe.steps):
        tasks = stream.draw(recipe.batch)
        errors = (predict(stack, tasks.tokens, stream.counts) - tasks.answers).square()
        # A sum over models: each model's gradient is that of its own loss.
        loss = errors.mean(1).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        on_step()


def predict(stack: nn.Module, tokens: Tensor, counts: Tensor) -> Tensor:
    """Answers ``(M, B)``: the model's sum over examples, divided by their number, so that weights are of order 1."""
    return stack(tokens) / counts.unsqueeze(1)


def rate(step: int, steps: int) -> float:
    """Factor of the learning rate at a step, counted from 0."""
    rise = max(round(WARM_UP * steps), 1)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + cos(pi * (step - rise) / max(steps - rise, 1)))
