"""Timing in turns, limits, and what is read off series of times."""

import time

import pytest
import torch

from linattn.lab.bench import timing
from linattn.lab.bench.series import clear_growth, compare_with, crossover, crossovers, overtaken, steady, times_by
from linattn.lab.bench.timing import CALLS, Timing, measure_in_turns, seconds_of, time_kernels

CPU = torch.device("cpu")


def test_repeats_are_counted_and_taken_in_turns(monkeypatch):
    order, seconds = [], {"a": 0.1, "b": 0.4}
    monkeypatch.setattr(timing, "seconds_of", lambda call, device: seconds[call()])
    calls = {name: lambda name=name: order.append(name) or name for name in seconds}
    found = measure_in_turns(calls, CPU, min_seconds=0.45, min_repeats=2)
    assert "".join(order) == "aabb" + "abab" + "aaa"  # warmed up twice each, then rounds until both have enough
    assert (found["a"].repeats, found["b"].repeats) == (5, 2)
    assert found["a"] == Timing(0.1, 0.1, 0.1, 5)
    order.clear()
    seconds["a"] = 50.0
    found = measure_in_turns({"a": calls["a"]}, CPU, min_seconds=0, min_repeats=9)
    assert (found["a"].repeats, len(order)) == (3, 4)  # slow calls get three repeats, and are not warmed up twice


def test_quantiles_of_known_samples():
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == Timing(3.5, 2.0, 5.0, 6)
    assert Timing.of([2.0]).row() == {"median_ms": 2000, "p20_ms": 2000, "p80_ms": 2000, "repeats": 1}


def test_calls_on_a_cpu():
    timed, by = time_kernels(lambda: torch.ones(8).sum(), CPU, 1.0)
    assert (by, timed.repeats) == (CALLS, 3)
    assert 0 < timed.p20 <= timed.median <= timed.p80
    assert 0.01 <= seconds_of(lambda: time.sleep(0.01), CPU) < 1


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_growth_of_a_power_law_is_its_power(power):
    times = {T: 3.0 * T**power for T in (1024, 2048, 4096)}
    assert clear_growth(times) == pytest.approx(power)
    assert clear_growth(times | {64: 1e6, 8192: 3.0 * 8192**power}) == pytest.approx(power)
    assert clear_growth(times | {1024: 1e3, 8192: 3.0 * 8192**power}) == pytest.approx(power)  # long ones count


@pytest.mark.parametrize(
    "times",
    [
        {}, {2048: 1.0, 4096: 2.0}, {64: 1.0, 128: 2.0, 256: 4.0}, {2048: 0.01, 4096: 0.02, 8192: 0.04},
        {2048: 1.0, 4096: 100.0, 8192: 900.0}, {2048: 9.0, 4096: 1.0, 8192: 8.0},
    ],
)  # fmt: skip
def test_nothing_is_told_of_noise(times):
    assert clear_growth(times) is None


def test_crossover_of_power_laws_is_exact_and_the_last_one_counts():
    # T^2 / 1000 = T at T = 1000, between two measured lengths; lines in log-log, so interpolation is exact.
    lengths = (256, 512, 1024, 2048)
    assert crossover({T: T**2 / 1000 for T in lengths}, {T: float(T) for T in lengths}) == pytest.approx(1000)
    assert 4 < crossover({1: 2.0, 2: 1.0, 4: 1.0, 8: 4.0}, {1: 1.0, 2: 2.0, 4: 2.0, 8: 1.0}) < 8
    ones, twos = dict.fromkeys((64, 128, 256), 1.0), dict.fromkeys((64, 128, 256), 2.0)
    assert crossover(twos, ones) == 64
    assert crossover(ones, twos) is None
    assert crossover({64: 2.0, 128: 1.0, 256: 2.0}, ones) == pytest.approx(128)  # as fast there
    assert crossover(ones, {}) is None
    assert crossover({**twos, 1024: 0.1}, ones) == 64  # a length that only one of them has says nothing


def test_crossovers_of_rows_that_count():
    rows = [{"mechanism": name, "length": T, "median_ms": ms, "status": "ok"}
            for T, softmax in ((1024, 1.0), (2048, 2.0), (4096, 4.0), (8192, 8.0))
            for name, ms in (("softmax", softmax), ("gated", 2 * 2**0.5), ("zeros", 9.0), ("elu", 0.5))]  # fmt: skip
    rows.append({"mechanism": "gated", "length": 16384, "median_ms": 0.1, "status": "WRONG"})
    rows.append({"mechanism": "noisy", "length": 8192, "median_ms": 1.0, "p20_ms": 0.5, "p80_ms": 3.0, "status": "ok"})
    found = {own["mechanism"]: own for own in crossovers(rows, "length", "softmax", "training")}
    assert found["gated"]["length"] == pytest.approx(2048 * 2**0.5)
    assert (found["gated"]["longest"], found["gated"]["gain"]) == (8192, 8 / (2 * 2**0.5))
    assert (found["zeros"]["length"], found["elu"]["length"]) == (None, 1024)
    assert "noisy" not in found
    assert "zeros, training: is not faster than softmax (0.889x at 8,192)" in overtaken(found.values())
    assert "elu, training: is faster from 1,024 on (16x at 8,192)" in overtaken(found.values())
    assert times_by(rows, "length", mechanism="gated") == dict.fromkeys((1024, 2048, 4096, 8192), 2 * 2**0.5)
    assert len(steady(rows)) == len(rows) - 1


def test_rows_are_compared_with_the_reference_among_those_alike():
    rows = [{"name": n, "T": T, "median_ms": ms} for T in (8, 16) for n, ms in (("softmax", T), ("elu", 24.0))]
    rows += [{"name": "elu", "T": 32, "median_ms": 1.0}, {"name": "elu", "T": 8}]
    compare_with(rows, "name", "softmax", "T", key="share")
    assert [row["share"] for row in rows] == [1, 3, 1, 1.5, None, None]
