"""Times calls: warmed up, repeated, and in turns where several are compared: a busy moment affects all alike."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from statistics import median, quantiles

import torch

from linattn.lab.train.captured_step import recorded

Call = Callable[[], object]
SHORT = 1.0  # second: in longer calls, what happens only once does not matter
MOST_SECONDS = 60.0
GRAPH, CALLS = "CUDA graph", "calls"


class Unmeasured(Exception):  # noqa: N818, it is an answer and no error
    """Raised where a case has no numbers: ``status`` is that of its row (absent, left out, WRONG)."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Timing:
    """Seconds of one call."""

    median: float
    p20: float
    p80: float
    repeats: int

    @classmethod
    def of(cls, samples: list[float]) -> "Timing":
        fifths = quantiles(samples, n=5, method="inclusive") if len(samples) > 1 else 4 * samples
        return cls(median(samples), fifths[0], fifths[3], len(samples))

    def row(self) -> dict[str, float]:
        """As rows have it, in milliseconds."""
        times = {"median_ms": self.median, "p20_ms": self.p20, "p80_ms": self.p80}
        return {name: 1000 * seconds for name, seconds in times.items()} | {"repeats": self.repeats}


def seconds_of(call: Call, device: torch.device) -> float:
    """Seconds of one call, up to the end of its work on the device; of a first call with all that it compiles."""
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
    calls: Mapping[str, Call], device: torch.device, *, min_seconds: float, min_repeats: int
) -> dict[str, Timing]:
    """Time each call at least ``min_repeats`` times and for ``min_seconds``, one call of each in every round.

    A call so slow that the repeats would take more than a minute gets fewer, but three at least.
    """
    for call in calls.values():
        if seconds_of(call, device) < SHORT:
            seconds_of(call, device)  # the first call may still choose kernels and grow the allocator's pools
    samples: dict[str, list[float]] = {name: [] for name in calls}

    def unfinished(name: str) -> bool:
        count, total = len(samples[name]), sum(samples[name])
        if total > MOST_SECONDS:
            return count < min(3, min_repeats)
        return count < min_repeats or total < min_seconds

    while waiting := [name for name in calls if unfinished(name)]:
        for name in waiting:
            samples[name].append(seconds_of(calls[name], device))
    return {name: Timing.of(taken) for name, taken in samples.items()}


def time_call(call: Call, device: torch.device, milliseconds: float) -> Timing:
    """The time of a call as Python calls it, with the host's work.

    On a GPU it is taken by Triton's ``do_bench``, which clears the L2 cache before each call. On a CPU a few calls are
    timed by the clock, enough to show that all of it runs.
    """
    if device.type != "cuda":
        return measure_in_turns({"": call}, device, min_seconds=0, min_repeats=3)[""]
    do_bench = import_module("triton.testing").do_bench
    middle, p20, p80 = do_bench(call, warmup=milliseconds / 4, rep=milliseconds, quantiles=[0.5, 0.2, 0.8])
    return Timing(middle / 1000, p20 / 1000, p80 / 1000, max(1, int(milliseconds / max(middle, 1e-6))))


def time_kernels(call: Call, device: torch.device, milliseconds: float) -> tuple[Timing, str]:
    """The time of replays of a CUDA graph, thus of kernels without the host; of calls, where there can be none."""
    replay = recorded(call, device) if device.type == "cuda" else None
    return time_call(replay or call, device, milliseconds), CALLS if replay is None else GRAPH
