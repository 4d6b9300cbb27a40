"""Random sizes of instances in training."""

from functools import cache

import numpy as np

from linattn.lab.tasks.synthetic.ragged import Floats, Ints

SMALLEST = 3


@cache
def shares(largest: int) -> Floats:
    """``P(n <= m)`` for ``m = 3 .. N``, where ``P(n) ~ 1 / (n + sqrt N)``: small n are frequent, and large n not rare.

    Example:
        >>> [round(float(share), 3) for share in shares(5)]
        [0.39, 0.718, 1.0]
    """
    chances = 1 / (np.arange(SMALLEST, largest + 1) + largest**0.5)
    return np.cumsum(chances) / chances.sum()


def draw_sizes(rng: np.random.Generator, number: int, largest: int, train: bool) -> Ints:
    """Sizes ``(number,)``: drawn as in training, or without ``train`` all the largest."""
    if not train:
        return np.full(number, largest)
    return SMALLEST + np.searchsorted(shares(largest)[:-1], rng.random(number), side="right")


def mean_size(largest: int, train: bool) -> float:
    chances = np.diff(shares(largest), prepend=0.0)
    return float(chances @ np.arange(SMALLEST, largest + 1)) if train else float(largest)
