"""Time and memory of a call on the device that is measured."""

import time
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from linattn.bench.kernels.bound import Outputs
from linattn.bench.memory import peak_bytes
from linattn.bench.timing import Timing, measure_in_turns

Call = Callable[[], Outputs]


def time_call(call: Callable[[], object], device: torch.device, milliseconds: float) -> Timing:
    """Milliseconds of one call.

    GPU: ``triton.testing.do_bench``, which times with events and clears the L2 cache before each call. CPU: a few
    calls by the clock, enough to show that all of it runs.
    """
    if device.type == "cuda":
        do_bench = import_module("triton.testing").do_bench
        quantiles = do_bench(call, warmup=int(milliseconds / 4), rep=int(milliseconds), quantiles=[0.5, 0.2, 0.8])
        median, p20, p80 = quantiles
        return Timing(median, p20, p80, max(1, int(milliseconds / max(median, 1e-6))))
    timing = measure_in_turns({"": call}, device, min_seconds=0, min_repeats=3)[""]
    return Timing(1000 * timing.median, 1000 * timing.p20, 1000 * timing.p80, timing.repeats)


def first_call(call: Call, device: torch.device) -> float:
    """Seconds by the clock, to the end of the work: compilation and tuning are in it."""
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def extra_bytes(call: Call, device: torch.device) -> int:
    """The most that a call allocates at one time beyond what it returns; its inputs are there already."""
    returned: list[int] = []

    def weighed() -> Outputs:
        outputs = call()
        tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
        # Storages, not views: one that returns its inputs changed in place allocates nothing for them.
        fresh = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        returned.append(sum(fresh.values()))
        return outputs

    return max(0, peak_bytes(weighed, device) - returned[0])
