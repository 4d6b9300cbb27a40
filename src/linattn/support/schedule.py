"""Learning rates as functions of the step alone, so that nothing has to be saved for a resumed run."""

import math
from typing import Literal

Schedule = Literal["cosine", "linear"]


def warmed_line(step: int, total: int, warmup: int, lr: float, min_lr: float) -> float:
    """The rate of ``step`` of ``total`` steps with ``warmup`` steps of warm-up: linear to ``lr``, then a line down.

    With s = step + 1, W steps of warm-up and T steps in all:

        s <= W:  lr s / W
        s >  W:  min_lr + (lr - min_lr) (T - s) / (T - W)

    Example:
        >>> [round(warmed_line(step, 6, 2, 1.0, 0.0), 2) for step in range(6)]
        [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    done = step + 1
    if done <= warmup:
        return lr * done / warmup
    return min_lr + (lr - min_lr) * (total - done) / (total - warmup)


def warmed_cosine(step: int, total: int, warmup: int, lr: float, min_lr: float) -> float:
    """As :func:`warmed_line`, but down half a cosine: ``min_lr + (lr - min_lr) (1 + cos(pi (s - W) / (T - W))) / 2``.

    Example:
        >>> [round(warmed_cosine(step, 4, 2, 1.0, 0.0), 2) for step in range(4)]
        [0.5, 1.0, 0.5, 0.0]
    """
    done = step + 1
    if done <= warmup:
        return warmed_line(step, total, warmup, lr, min_lr)
    turn = math.pi * (done - warmup) / (total - warmup)
    return min_lr + (lr - min_lr) * (1 + math.cos(turn)) / 2


SCHEDULES = {"cosine": warmed_cosine, "linear": warmed_line}
