"""Times calls: warmed up, repeated, and in turns where several are compared: a busy moment affects all alike."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from statistics import median, quantiles
from types import FrameType
from typing import Any

import torch

Call = Callable[[], object]
SHORT = 1.0  # second: in longer calls, what happens only once does not matter
GRAPH, CALLS, LONG_CALLS = "CUDA graph", "calls", "long calls"
LONG_SECONDS = 0.1  # in longer calls the host's work, some milliseconds for many launches, hardly matters


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

    def row(self) -> dict[str, float]:
        """As rows have it, in milliseconds."""
        times = {"median_ms": self.median, "p20_ms": self.p20, "p80_ms": self.p80}
        return {name: 1000 * seconds for name, seconds in times.items()} | {"repeats": self.repeats}


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


def time_call(call: Call, device: torch.device, milliseconds: float, graph: bool = True) -> tuple[Timing, Timing, str]:
    """The time of a call as it counts, as Python calls it with the host's work, and how the first was taken.

    On a GPU, replays of a CUDA graph count, and thus kernels without the host; where a call cannot be captured or is
    long, the calls themselves. Both are timed by Triton's ``do_bench``, which clears the L2 cache before each call. On
    a CPU a few calls are timed by the clock, enough to show that all of it runs.
    """
    if device.type != "cuda":
        timing = measure_in_turns({"": call}, device, min_seconds=0, min_repeats=3)[""]
        return timing, timing, CALLS
    called = by_events(call, milliseconds / 2)
    if called.median > LONG_SECONDS:
        return called, called, LONG_CALLS
    replay = capture(call) if graph else None
    return (called, called, CALLS) if replay is None else (by_events(replay, milliseconds), called, GRAPH)


def by_events(call: Call, milliseconds: float) -> Timing:
    do_bench = import_module("triton.testing").do_bench
    middle, p20, p80 = do_bench(call, warmup=milliseconds / 4, rep=milliseconds, quantiles=[0.5, 0.2, 0.8])
    return Timing(middle / 1000, p20 / 1000, p80 / 1000, max(1, int(milliseconds / max(middle, 1e-6))))


def capture(call: Call, warm_ups: int = 2, stream: torch.cuda.Stream | None = None) -> Callable[[], None] | None:
    """Replays of the call as one CUDA graph; None if it does something that a graph cannot hold, such as waiting."""
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):  # what libraries do only once must not be captured
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph, kept = torch.cuda.CUDAGraph(), list[object]()
    try:
        with torch.cuda.graph(graph, stream=stream):
            kept.append(call())
    except Exception:
        torch.cuda.synchronize()
        return None

    def replay() -> None:
        assert kept  # while the graph is replayed, its outputs must keep their memory
        graph.replay()

    return replay


class TimeLimitError(RuntimeError):
    """Raised when a call takes too long and is stopped."""


def first_call(call: Call, device: torch.device, most_seconds: float) -> float:
    """Seconds until the first call's work ends, compilation and tuning included; TimeLimitError beyond the limit."""
    begin = time.perf_counter()
    with time_limit(most_seconds), quick_tuning(device):
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - begin


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Stop Python code, including compilers written in it, after some time; without signals this does nothing."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeLimitError(f"its first call was stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def quick_tuning(device: torch.device) -> Iterator[None]:
    """Let Triton's autotuner time each configuration for 25 ms instead of 125: libraries try hundreds of them."""
    if device.type != "cuda":
        yield
        return
    testing: Any = import_module("triton.testing")
    thorough = testing.do_bench
    testing.do_bench = partial(thorough, warmup=5, rep=20)
    try:
        yield
    finally:
        testing.do_bench = thorough
