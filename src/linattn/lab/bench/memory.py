"""Peak memory of a call, in bytes, and what a call would cost at a length.

CUDA: ``torch.cuda.max_memory_allocated``, which the caching allocator keeps exactly.

CPU: PyTorch's profiler records every allocation and release of the CPU allocator with its size; the running sum of
these is the memory in use, and its maximum the peak. This is exact and repeatable to the byte, and it sees the
buffers that kernels allocate inside one op, which a ``TorchDispatchMode`` cannot. The high-water mark of a process
(``ru_maxrss``) was the alternative: it needs a fresh process per row and counts the interpreter, libraries, pages
that were freed but not returned and the profiler's own records. What the profiler does not see is scratch that MKL or
oneDNN allocate by themselves, some hundred KiB per thread.

The call must allocate its own inputs, so that inputs and gradients count in the peak.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile
from torch.utils._pytree import tree_leaves

MEMORY_EVENT = "[memory]"
FIRST_PROBE, PROBE_STEP = 32, 4


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most that ``call`` allocates at one time, its result included."""
    return _peak_on_cuda(call, device) if device.type == "cuda" else _peak_on_cpu(call)


def _peak_on_cuda(call: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(call: Callable[[], object]) -> int:
    # The tracing library logs each start and stop on stderr unless its level is above all of its messages.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(profile_memory=True) as recorded:
        result = call()
    assert recorded.kineto_results is not None
    changes = [
        (event.start_ns(), event.nbytes())
        for event in recorded.kineto_results.events()
        if event.name() == MEMORY_EVENT and event.device_type() == DeviceType.CPU
    ]
    del result  # kept until here: its release must not be recorded before the peak that includes it
    changes.sort(key=lambda change: change[0])  # threads record separately; sort is stable within one
    in_use = peak = 0
    for _, nbytes in changes:
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


@dataclass(frozen=True)
class Cost:
    """What one call costs at a length, and with which powers of it its seconds and its memory grow."""

    length: int
    seconds: float
    peak: float
    powers: tuple[int, int]

    def at(self, length: int) -> "Cost":
        factor = length / self.length
        return replace(
            self, length=length, seconds=self.seconds * factor ** self.powers[0],
            peak=self.peak * factor ** self.powers[1],
        )  # fmt: skip

    def excess(self, max_seconds: float, max_bytes: float) -> str:
        """Why it is too much; empty if it is not."""
        if self.peak > max_bytes:
            return f"about {self.peak / 2**30:.3g} GiB, limit {max_bytes / 2**30:.3g} GiB"
        return f"about {self.seconds:.3g} s a call, limit {max_seconds:g} s" if self.seconds > max_seconds else ""


def predict(probe: Callable[[int], Cost], length: int, max_seconds: float, max_bytes: float) -> Cost:
    """The cost at ``length`` from shorter ones, so that nothing starts that cannot end.

    ``probe(n)`` measures at n; lengths grow by a factor of four while what they will cost is allowed.
    """
    cost = probe(min(FIRST_PROBE, length))
    while cost.length * PROBE_STEP < length and not cost.at(cost.length * PROBE_STEP).excess(max_seconds, max_bytes):
        cost = probe(cost.length * PROBE_STEP)
    return cost.at(length)


def free_bytes(device: torch.device) -> int:
    """Memory that could be allocated now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: what the system calls free is the next best
    names = os.sysconf_names
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
