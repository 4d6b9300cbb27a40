"""Profiles which kernels a step runs, and how much of its time each takes."""

import ast
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

TOP = 12
MARKS = ("##", "Torch-Compiled", "ProfilerStep")
# By the name of a kernel; the first that matches counts.
KINDS = (
    ("flash softmax", r"flash|fmha|sdpa|scaled_dot_product"),
    ("matrix product", r"gemm|cutlass|nvjet|cublas|xmma|addmm|\bmm\b|bmm|matmul|linear|convolution|conv2d"),
    ("inductor", r"^triton_|^graph_\d|cpp_fused"),
    ("copies and fills", r"FillFunctor|memcpy|memset|CatArray|copy_"),
    ("eager elementwise", r"elementwise_kernel"),
    ("eager", r"at::native|at_cuda|^aten::"),
)  # fmt: skip


def profile_step(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """The most expensive kernels of a step, the share of each kind, and eager elementwise kernels by name."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    step()
    with profile(activities=activities) as recorded:
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
    times: dict[str, list[float]] = {}
    for event in recorded.key_averages():
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if spent > 0 and (not on_gpu or _is_kernel(event)):
            own = times.setdefault(event.key, [0.0, 0])
            own[0] += spent
            own[1] += event.count
    return summarise(times)


def _is_kernel(event: Any) -> bool:
    """Whether an event is a kernel, and not a marked region, whose kernels are counted by themselves."""
    marked = getattr(event, "is_user_annotation", False) or event.key.startswith(
        ("##", "Torch-Compiled", "ProfilerStep")
    )
    return "CUDA" in str(event.device_type) and not marked


def summarise(times: dict[str, list[float]]) -> dict[str, Any]:
    """Summarise ``times``: microseconds of each call, by name of the kernel."""
    total = sum(spent for spent, _ in times.values()) or 1.0
    kinds: dict[str, float] = {}
    for name, (spent, _) in times.items():
        kinds[kind_of(name)] = kinds.get(kind_of(name), 0.0) + spent / total
    ordered = sorted(times.items(), key=lambda item: -item[1][0])
    top = [
        {"kernel": name[:120], "kind": kind_of(name), "calls": int(calls), "ms": spent / 1000, "share": spent / total}
        for name, (spent, calls) in ordered[:TOP]
    ]
    eager = {name[:120]: int(calls) for name, (_, calls) in ordered if kind_of(name) == "eager elementwise"}
    shares = dict(sorted(kinds.items(), key=lambda item: -item[1]))
    return {"ms": total / 1000, "shares": shares, "top": top, "eager_elementwise": eager}


def kind_of(kernel: str) -> str:
    if kernel in own_kernels() or kernel.startswith("linattn::"):
        return "linattn"
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.I)), "other")


@cache
def own_kernels() -> frozenset[str]:
    """Names of this library's kernels, read from its files, as importing them would need Triton."""
    import linattn.kernels as package

    names: set[str] = set()
    for path in Path(package.__path__[0]).glob("*/device/*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                names.add(node.name)
    return frozenset(names)
