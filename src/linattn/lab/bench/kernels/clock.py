"""Measures time and memory of calls on a device."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from statistics import median
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from linattn.lab.bench.kernels.bound import Outputs
from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.timing import Timing, measure_in_turns

Call = Callable[[], Outputs]
GRAPH, CALLS, LONG_CALLS = "CUDA graph", "calls", "long calls"
LEAST_CALLS = 3  # fewest calls for a median
LONG_MS = 100.0  # in longer calls the host's work, some milliseconds for many launches, hardly matters


@dataclass(frozen=True)
class Clocked:
    """Milliseconds of one call: as it counts, and as called from Python, including the host's work."""

    timing: Timing
    by: str
    called_ms: float


class TimeLimitError(RuntimeError):
    """Raised when a call takes too long and is stopped."""


def time_call(call: Callable[[], object], device: torch.device, milliseconds: float) -> Clocked:
    """Measure the milliseconds of one call.

    On a GPU, replays of a CUDA graph of the call are timed, and thus kernels without the host; if the call cannot be
    captured, or is long, the calls themselves. Both are timed by events, with the L2 cache cleared before each. On a
    CPU a few calls are timed by the clock, enough to show that all of it runs.
    """
    if device.type != "cuda":
        timing = measure_in_turns({"": call}, device, min_seconds=0, min_repeats=3)[""]
        timing = Timing(1000 * timing.median, 1000 * timing.p20, 1000 * timing.p80, timing.repeats)
        return Clocked(timing, CALLS, timing.median)
    called = by_events(call, milliseconds / 2)
    if called.median > LONG_MS:
        return Clocked(called, LONG_CALLS, called.median)
    replay = capture(call)
    if replay is None:
        return Clocked(called, CALLS, called.median)
    return Clocked(by_events(replay, milliseconds), GRAPH, called.median)


def by_events(call: Callable[[], object], milliseconds: float) -> Timing:
    do_bench = import_module("triton.testing").do_bench
    median, p20, p80 = do_bench(call, warmup=milliseconds / 4, rep=milliseconds, quantiles=[0.5, 0.2, 0.8])
    return Timing(median, p20, p80, max(1, int(milliseconds / max(median, 1e-6))))


def by_replays(call: Callable[[], object], milliseconds: float) -> Timing:
    """As :func:`by_events`, with fewer calls before those that count: do_bench makes seven."""
    cache = import_module("triton.runtime").driver.active.get_empty_cache_for_benchmark()

    def timed(count: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, stop in events:
            cache.zero_()
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()  # only once: between calls the GPU would wait for the host
        return [start.elapsed_time(stop) for start, stop in events]

    return time_few(timed, milliseconds)


def time_few(timed: Callable[[int], list[float]], milliseconds: float) -> Timing:
    """Time about ``milliseconds`` of calls, at least three; ``timed(n)`` gives the milliseconds of n calls in a row.

    Before these come one call, which may still load the graph, and more calls for up to a quarter of ``milliseconds``.
    """
    (estimate,) = timed(1)
    more = int(milliseconds / 4 / estimate)
    if more:
        estimate = median(timed(more))
    return Timing.of(timed(max(LEAST_CALLS, round(milliseconds / estimate))))


def capture(
    call: Callable[[], object], warm_ups: int = 2, stream: torch.cuda.Stream | None = None
) -> Callable[[], None] | None:
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
        raise TimeLimitError(f"stopped after {seconds:.0f} s")

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


def extra_bytes(call: Call, device: torch.device) -> int:
    """The most that a call allocates at a time beyond what it returns; its inputs exist before."""
    returned: list[int] = []

    def weighed() -> Outputs:
        outputs = call()
        tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
        # Storages, not views: a call that returns its inputs changed in place allocates nothing for them.
        fresh = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        returned.append(sum(fresh.values()))
        return outputs

    return max(0, peak_bytes(weighed, device) - returned[0])
