"""Times a step in the way of its mode."""

import torch

from linattn.lab.bench.kernels.clock import by_events, by_replays, capture
from linattn.lab.bench.models.steps import EAGER_GRAPH, GRAPH, Step, side_stream
from linattn.lab.bench.timing import Timing, measure_in_turns


def time_step(step: Step, mode: str, device: torch.device, milliseconds: float) -> Timing | None:
    """Milliseconds of a step, from about ``milliseconds`` of steps; None if no CUDA graph can be captured."""
    if device.type != "cuda":
        timing = measure_in_turns({"": step}, device, min_seconds=0, min_repeats=3)[""]
        return Timing(1000 * timing.median, 1000 * timing.p20, 1000 * timing.p80, timing.repeats)
    if mode == EAGER_GRAPH:  # it has run twice on that stream
        replay = capture(step, 0, side_stream(device))
        return None if replay is None else by_replays(replay, milliseconds)
    call = capture(step) if mode == GRAPH else step
    return None if call is None else by_events(call, milliseconds)
