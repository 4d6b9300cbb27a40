"""Random draws for many sequences at once."""

from random import Random

import torch
from torch import Tensor


def distinct(generator: torch.Generator, count: int, weights: Tensor, number: int) -> Tensor:
    """Draw ``(count, number)`` indices into ``weights (N,)`` or ``(count, N)``, one after another, without repetition.

    Each draw takes index i with a chance proportional to ``weights[i]`` among those left. The order in which
    exponential clocks with these rates ring is such a draw: without a loop, and exact even if weights differ widely.
    """
    # log(1 - u), as u may be 0 and a clock must ring at a finite time; u = 0 itself would be 0 / 0 with a weight of 0.
    uniform = torch.rand(count, weights.shape[-1], generator=generator, dtype=torch.float64).clamp_(min=2.0**-60)
    clocks = -torch.log1p(-uniform) / weights
    return clocks.topk(number, largest=False, sorted=True).indices


def choose(generator: torch.Generator, count: int, total: int, number: int) -> Tensor:
    """Draw ``(count, number)`` indices below ``total``, all equally likely, without repetition, in random order."""
    return torch.rand(count, total, generator=generator).topk(number, largest=False, sorted=True).indices


def python_random(generator: torch.Generator) -> Random:
    """A generator of plain Python, seeded by the next draw, for sequences that are grown step by step."""
    return Random(int(torch.randint(2**62, (1,), generator=generator)))


def whole(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    """Whole numbers, uniform in ``low .. high``, both ends included."""
    return torch.randint(low, high + 1, shape, generator=generator)
