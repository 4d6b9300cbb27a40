import math

import pytest

from linattn.lab.bench.fit import crossover, growth_exponent


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_growth_of_a_power_law_is_its_power(power):
    assert growth_exponent({T: 3e-4 * T**power for T in (256, 512, 4096)}) == pytest.approx(power)


def test_growth_ignores_short_lengths_when_three_long_ones_are_there():
    times = {T: 1e-6 * T**2 for T in (2048, 4096, 8192)}
    assert growth_exponent({**times, 64: 5.0, 1024: 5.0}) == pytest.approx(2)
    assert growth_exponent({64: 5.0, 1024: 5.0, 2048: 5.0, 4096: 10.0}) < 1  # two long ones: all count


def test_growth_is_the_least_squares_line():
    noise = {1024: 1.3, 2048: 0.8, 4096: 1.1, 8192: 0.9}
    times = {T: factor * T for T, factor in noise.items()}
    # The slope by the textbook's other formula, (n Sxy - Sx Sy) / (n Sxx - Sx^2), over the three long ones.
    x = [math.log(T) for T in times if T >= 2048]
    y = [math.log(t) for T, t in times.items() if T >= 2048]
    n = len(x)
    slope = (n * sum(a * b for a, b in zip(x, y, strict=True)) - sum(x) * sum(y)) / (
        n * sum(a * a for a in x) - sum(x) ** 2
    )
    assert growth_exponent(times) == pytest.approx(slope)


def test_growth_needs_two_lengths():
    assert growth_exponent({}) is None
    assert growth_exponent({512: 1.0}) is None


def test_crossover_of_power_laws_is_exact():
    # T^2 / 1000 = T at T = 1000, between two measured lengths; lines in log-log, so interpolation is exact.
    lengths = (256, 512, 1024, 2048)
    assert crossover({T: T**2 / 1000 for T in lengths}, {T: float(T) for T in lengths}) == pytest.approx(1000)


def test_crossover_takes_the_last_crossing():
    slow = {1: 2.0, 2: 1.0, 4: 1.0, 8: 4.0}
    fast = {1: 1.0, 2: 2.0, 4: 2.0, 8: 1.0}
    assert 4 < crossover(slow, fast) < 8


def test_crossover_at_the_ends():
    ones, twos = dict.fromkeys((64, 128, 256), 1.0), dict.fromkeys((64, 128, 256), 2.0)
    assert crossover(twos, ones) == 64
    assert crossover(ones, twos) is None
    assert crossover(ones, {}) is None
    assert crossover({**twos, 1024: 0.1}, ones) == 64  # a length that only one of them has says nothing
