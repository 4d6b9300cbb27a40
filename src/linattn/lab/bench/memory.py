"""Peak memory of a call, in bytes.

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

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile

MEMORY_EVENT = "[memory]"


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
