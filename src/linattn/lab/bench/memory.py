"""Peak memory of a call, in bytes, and whether a call would cost too much.

The call must allocate its own inputs, so that inputs and gradients count in the peak.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile
from torch.utils._pytree import tree_leaves

from linattn.lab.bench.timing import Call, Unmeasured, seconds_of

FIRST_PROBE = 64


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most that ``call`` allocates at one time, its result included."""
    if device.type != "cuda":
        return _peak_on_cpu(call)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(call: Callable[[], object]) -> int:
    """The largest running sum of what PyTorch's profiler records: every allocation and release, exact to the byte.

    It sees the buffers that kernels allocate inside one op, but not what MKL or oneDNN allocate by themselves, some
    hundred KiB a thread.
    """
    # The tracing library logs each start and stop on stderr unless its level is above all of its messages.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(profile_memory=True) as recorded:
        result = call()
    assert recorded.kineto_results is not None
    changes = [
        (event.start_ns(), event.nbytes())
        for event in recorded.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    ]
    del result  # kept until here: its release must not be recorded before the peak that includes it
    in_use = peak = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):  # threads record separately
        in_use += nbytes
        peak = max(peak, in_use)
    return peak


def extra_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most that a call allocates at a time beyond what it returns; its inputs exist before."""
    returned: list[int] = []

    def weighed() -> object:
        outputs = call()
        # Storages, not views: a call that returns its inputs changed in place allocates nothing for them.
        storages = [tensor.untyped_storage() for tensor in tree_leaves(outputs) if isinstance(tensor, torch.Tensor)]
        returned.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
        return outputs

    return max(0, peak_bytes(weighed, device) - returned[0])


def check_affordable(
    calls_at: Callable[[int], tuple[Call, Call | None]], length: int, device: torch.device, max_seconds: float,
    max_gib: float | None,
) -> None:  # fmt: skip
    """Leave a call out that would take too long or too much memory, so that nothing starts that cannot end.

    Shorter calls are measured: twice the length costs four times as much at the most. ``max_gib``: None is half of what
    is free.

    Args:
        calls_at: the call of a length that is timed, and the one that is weighed; None: its memory does not matter.
    """
    max_bytes, n = free_bytes(device) / 2 if max_gib is None else max_gib * 2**30, FIRST_PROBE
    while n < length:
        timed, weighed = calls_at(n)
        seconds = 4 * min(seconds_of(timed, device) for _ in range(3))
        peak = 0 if weighed is None else 4 * peak_bytes(weighed, device)
        n = min(2 * n, length)
        if peak > max_bytes:
            reason = f"about {peak / 2**30:.3g} GiB at {n} tokens, limit {max_bytes / 2**30:.3g} GiB"
            raise Unmeasured("left out", reason)
        if seconds > max_seconds:
            raise Unmeasured("left out", f"about {seconds:.3g} s a call at {n} tokens, limit {max_seconds:g} s")


def free_bytes(device: torch.device) -> int:
    """Memory that could be allocated now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    path = Path("/proc/meminfo")
    if path.exists():
        return 1024 * int(re.findall(r"MemAvailable:\s+(\d+)", path.read_text())[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
