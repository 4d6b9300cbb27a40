"""Seeds of steps."""

import random

import numpy as np
import torch

from linattn.support.seeds import mixed_seed, seed_step


def draws():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]


def test_all_generators_depend_on_the_four_numbers_alone():
    torch.manual_seed(1)
    seed_step(3, 2, 1, 0)
    first = draws()
    torch.manual_seed(2)
    np.random.seed(2)
    random.seed(2)
    seed_step(3, 2, 1, 0)
    assert draws() == first


def test_every_number_changes_every_generator():
    seen = []
    for numbers in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 1, 1, 1), (10, 0, 0, 0)):
        seed_step(*numbers)
        seen.append(draws())
    for generator in zip(*seen, strict=True):
        assert len({tuple(numbers) for numbers in generator}) == len(seen)


def test_neighbouring_steps_are_unrelated():
    """The first draws of 4,000 steps in a row are uniform and do not follow one another."""
    first = []
    for step in range(4000):
        seed_step(0, 0, step, 0)
        first.append(float(torch.rand(())))
    values = torch.tensor(first, dtype=torch.float64)
    limit = 5 / 4000**0.5  # five standard errors of a correlation
    assert abs(values.mean() - 0.5) < limit / 12**0.5
    assert abs(torch.corrcoef(torch.stack((values[1:], values[:-1])))[0, 1]) < limit


def test_purposes_and_orders_of_numbers_differ():
    seeds = {
        mixed_seed(*given) for given in (("a", 1, 23), ("a", 12, 3), ("b", 1, 23), ("a", 23, 1), ("a", 1, 2, 3), ("a",))
    }
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
