"""Times calls: warmed up, repeated, and in turns, so that a busy moment of the machine affects all alike."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

import torch

Call = Callable[[], object]
SHORT = 1.0  # second: in longer calls, what happens only once does not matter


@dataclass(frozen=True)
class Timing:
    """Seconds of one call."""

    median: float
    p20: float
    p80: float
    repeats: int

    @classmethod
    def of(cls, samples: list[float]) -> "Timing":
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1)
        fifths = quantiles(samples, n=5, method="inclusive")
        return cls(median(samples), fifths[0], fifths[3], len(samples))


def seconds_of(call: Call, device: torch.device) -> float:
    """Seconds of one call, up to the end of its work on the device."""
    if device.type == "cuda":
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(stop) / 1000
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure_in_turns(
    calls: Mapping[str, Call], device: torch.device, *, min_seconds: float, min_repeats: int, most_seconds: float = 60
) -> dict[str, Timing]:
    """Time each call at least ``min_repeats`` times and for ``min_seconds``, one call of each in every round.

    A call so slow that the repeats would take more than ``most_seconds`` gets fewer, but three at least.
    """
    for call in calls.values():
        if seconds_of(call, device) < SHORT:
            seconds_of(call, device)  # the first call may still choose kernels and grow the allocator's pools
    samples: dict[str, list[float]] = {name: [] for name in calls}

    def unfinished(name: str) -> bool:
        count, total = len(samples[name]), sum(samples[name])
        if total > most_seconds:
            return count < min(3, min_repeats)
        return count < min_repeats or total < min_seconds

    while waiting := [name for name in calls if unfinished(name)]:
        for name in waiting:
            samples[name].append(seconds_of(calls[name], device))
    return {name: Timing.of(taken) for name, taken in samples.items()}
