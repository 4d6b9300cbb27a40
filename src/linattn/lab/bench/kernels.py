"""`linattn kernels`: time of GPU kernels beside rivals and the floor."""

import multiprocessing
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from linattn.lab.bench.benchmark import FORWARD, TRAINING, Benchmark, Row, only_quick_on_cpu, shared
from linattn.lab.bench.kernel_cases import BY_NAME, COLD, COLD_CASES, OURS, outcomes, select
from linattn.lab.bench.memory import extra_bytes
from linattn.lab.bench.problems import CONSTANT, Problem, Tensors, Truth, differentiable, drawn
from linattn.lab.bench.rivals import PACKAGES, Contender, make_contenders
from linattn.lab.bench.timing import seconds_of, time_call, time_kernels
from linattn.lab.cases import Case, Work
from linattn.lab.page.plots import Chart, Panel, styles
from linattn.mechanisms.registry import create_mechanism
from linattn.support.config import option

CEILINGS = ("copy_bytes_per_second", "matmul_per_second")
SMALLEST_CHUNK = 16  # size of the tiles of a GPU's matrix units


@dataclass(frozen=True, kw_only=True)
class Kernels(Benchmark):
    """Time of kernels on a GPU beside rivals and the floor.

    Every row is checked against fp64 in the same run. The floor is what memory and arithmetic allow at the least, by
    the copy bandwidth and the matmul rate that the run measures first. This library is timed in every case first, then
    what goals are set against, then the rest.

    Exit code: 0 all right, 1 a row of this library was WRONG or failed, 2 a bad option, 130 interrupted (what is done
    is kept).
    """

    only: tuple[str, ...] = option(
        (), "Cases, with commas; causal-* takes all that start so.", affects=False, default_text="all"
    )  # fmt: skip
    contenders: tuple[str, ...] = option(
        (), "Only contenders whose names start with these, such as linattn,fla,mlstm,SDPA.", affects=False,
        default_text="all",
    )  # fmt: skip
    dtype: Literal["", "bfloat16", "float16", "float32"] = option(
        "", "Type of the inputs.", default_text="bfloat16, on a CPU float32"
    )  # fmt: skip
    milliseconds: float = option(60.0, "Milliseconds of measured calls for a row.", above=0)
    cold: bool = option(True, "Time first calls in fresh processes with empty caches too.", affects=False)
    quick: bool = option(False, "Tiny shapes: shows that everything runs, times nothing.")

    name: ClassVar[str] = "kernels"
    keys: ClassVar[tuple[str, ...]] = ("case", "contender", "pass_name")
    columns: ClassVar[tuple[str, ...]] = (
        "case", "contender", "pass_name", "median_ms", "over_floor", "called_ms", "extra_over_qkvo", "budget"
    )  # fmt: skip
    packages: ClassVar[tuple[str, ...]] = PACKAGES

    def check(self) -> None:
        super().check()
        select(self.only)
        only_quick_on_cpu(self, "kernels")

    def filled(self) -> Self:
        return replace(super().filled(), dtype=self.dtype or ("bfloat16" if self.on_gpu else "float32"))

    def problem(self, name: str) -> Problem:
        return BY_NAME[name].resized(1, 2, 64, 16) if self.quick else BY_NAME[name]

    def cases(self) -> list[dict[str, Any]]:
        """This library in every case, then the contenders that goals refer to, then the rest."""
        ordered: list[tuple[int, dict[str, Any]]] = []
        for own in select(self.only):
            against = {goal.against for goal in (*own.forward, *own.training)}
            for contender in make_contenders(own):
                name = contender.name
                if not self.contenders or name.startswith(self.contenders):
                    step = 0 if name == OURS else 1 if name in against else 2
                    ordered += [(step, self.case(case=own.name, contender=name, pass_name=p)) for p in own.passes]
            if self.cold and self.on_gpu and own.name in COLD_CASES:
                ordered.append((3, self.case(case=own.name, contender=OURS, pass_name=COLD)))
        return [case for _, case in sorted(ordered, key=lambda item: item[0])]

    def named(self, case: Case) -> tuple[Problem, Contender]:
        problem = self.problem(case["case"])
        return problem, next(own for own in make_contenders(problem) if own.name == case["contender"])

    def fill(self, case: Case, work: Work, row: Row) -> None:
        """Call a contender once, check it, time it and weigh it; what is wrong is timed all the same."""
        problem, contender = self.named(case)
        row |= {"shape": problem.shape, "note": contender.note}
        device = self.place()
        if case["pass_name"] == COLD:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
                row["first_seconds"] = fresh.submit(cold_start, self, case).result()
            return
        row |= measure_ceilings(device, self.quick)
        key = "kernels", problem.name, str(case["settings"])
        tensors, grad, truth = shared(key, lambda: self.drawn(problem))
        own_grad = grad if case["pass_name"] == TRAINING else None
        work.tell(0.2, "first call")
        bound = contender.bind(problem, tensors)
        call = bound.call(own_grad)
        call()
        work.tell(0.4, "checking")
        row |= truth.check(bound, own_grad, softmax=contender.softmax).row()
        work.tell(0.6, "timing")
        timing, row["timed_by"] = time_kernels(call, device, self.milliseconds)
        row |= timing.row() | {"called_ms": 1000 * time_call(call, device, self.milliseconds / 2).median}
        row["floor_ms"] = floors(problem, tensors, *(row[name] for name in CEILINGS))[case["pass_name"]]
        row["over_floor"] = row["median_ms"] / row["floor_ms"]
        extra = extra_bytes(call, device)
        row |= {"extra_bytes": extra, "extra_over_qkvo": extra / qkvo_bytes(problem, tensors)}

    def drawn(self, problem: Problem) -> tuple[Tensors, Tensor, Truth]:
        return drawn(problem, self.place(), getattr(torch, self.dtype), self.seed)

    def described(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The ceilings."""
        found = {name: [row.pop(name) for row in rows if name in row] for name in CEILINGS}
        return {name: median(values) for name, values in found.items() if values}

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        goals = [] if self.quick else [goal for goal in outcomes(rows) if goal["reached"] is not None]
        missed = [f"{g['case']} {g['what']} {g['goal']}: {g['value']:.2f}" for g in goals if not g["reached"]]
        said = [f"{len(goals) - len(missed)} of {len(goals)} measured goals are reached."] if goals else []
        return said + ([f"Not reached: {'; '.join(missed)}."] if missed else [])

    def bad(self, row: Row) -> bool:
        """Failures of rivals are results."""
        return super().bad(row) and row["contender"].startswith("linattn")

    def chart(self, rows: Sequence[Row], meta: Mapping[str, Any]) -> Chart | None:
        """Time over the floor, a line a case; what is wrong is hollow."""
        timed = [row for row in rows if row.get("over_floor") and row["status"] in ("ok", "WRONG")]
        cases = list(dict.fromkeys(row["case"] for row in timed))
        looks = styles(list(dict.fromkeys(row["contender"] for row in timed)))

        def draw(axes: Any, pass_name: str) -> None:
            for row in (row for row in timed if row["pass_name"] == pass_name):
                look, place = looks[row["contender"]], ([row["over_floor"]], [cases.index(row["case"])])
                face = look.color if row["status"] == "ok" else "none"
                axes.plot(*place, look.marker, color=look.color, markerfacecolor=face, markersize=5)
            axes.set_xscale("log")
            axes.set_yticks(range(len(cases)), cases)
            axes.set(title=pass_name, xlabel="time over floor")

        passes, height = (FORWARD, TRAINING), 1.2 + 0.2 * len(cases)
        panels = [Panel(partial(draw, pass_name=own), f"{own}, time over floor by case", height, 1.6) for own in passes]
        title, reading = f"time over floor, {meta['device']}", "A line a case; hollow marks were not right."
        return Chart("kernels", title, reading, panels, looks) if timed else None


def cold_start(config: Kernels, case: Case) -> float:
    """Seconds of the first forward and backward, in a process that is fresh and with empty caches.

    Importing PyTorch and waking the GPU are not counted.
    """
    with tempfile.TemporaryDirectory(prefix="linattn-cold-", ignore_cleanup_errors=True) as folder:
        os.environ["TRITON_CACHE_DIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        problem, contender = config.named(case)
        tensors, grad, _ = config.drawn(problem)
        (grad.flatten()[:64, None] @ grad.flatten()[None, :64]).sum().item()
        return seconds_of(lambda: contender.bind(problem, tensors).call(grad)(), config.place())


@cache
def measure_ceilings(device: torch.device, small: bool = False) -> dict[str, Any]:
    """Bytes a second of a copy that reads and writes 8.6 GB in all, operations a second of two 8192-cubes in bf16."""
    nbytes, side = (2**24, 256) if small else (2**32, 8192)
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Called directly: in a CUDA graph a copy is another kind of node, which moved a third less on an H200.
    copy = time_call(lambda: target.copy_(source), device, milliseconds=100).median
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = time_kernels(lambda: a @ b, device, milliseconds=100)[0].median
    return {"copy_bytes_per_second": 2 * nbytes / copy, "matmul_per_second": 2 * side**3 / product}


def floors(case: Problem, tensors: Tensors, bandwidth: float, matmul: float) -> dict[str, float]:
    """The least milliseconds that memory and arithmetic allow, by the ceilings of the device.

    ``max(bytes / copy bandwidth, operations / matmul rate)``. In bytes, every input is read once and every output
    written once; backward reads the inputs and the gradient of the output, and writes the gradients. A backward starts
    after its forward has ended, so the floor of both is the sum of the two.
    """
    nbytes = size(tensors) + output_bytes(case, tensors)
    both = zip((nbytes, nbytes + size(differentiable(case, tensors))), operations(case), strict=True)
    seconds = [max(moved / bandwidth, done / matmul) for moved, done in both]
    return {FORWARD: 1000 * seconds[0], TRAINING: 1000 * sum(seconds)}


def operations(case: Problem) -> tuple[int, int]:
    """Operations of forward and backward, counting matrix products alone.

    Per head and token, with K features, V values, L tokens of the smallest chunk; a normaliser counts as one more
    value:

    =============================  ==================================  =====================================
    form                           forward                             backward
    =============================  ==================================  =====================================
    bidirectional                  4 K V                               8 K V
    causal, any decay              4 K V + (L + 1) (K + V)             10 K V + (L + 1) (3 K + 2 V)
    bidirectional with decay       8 K V + 2 L (K + V)                 20 K V + 2 L (3 K + 2 V)
    decoding step                  6 K V                               -
    short convolution, W taps      2 W a channel                       4 W a channel
    =============================  ==================================  =====================================

    In causal forms each chunk writes (2 K V) and reads (2 K V) a state, and pairs inside it cost ``2 (K + V)`` each, of
    which a token has (L + 1) / 2 on average. Two sweeps need two states, and every pair of a chunk. Mechanisms report
    their own count.
    """
    K, V, L = case.K, case.V + (case.normalized or case.family == "exponential"), SMALLEST_CHUNK
    tokens = case.B * case.H * case.T
    if case.family == "convolution":
        per_channel = 2 * case.taps * case.B * case.T * case.K
        return per_channel, 2 * per_channel
    if case.family == "step":
        return 6 * K * V * tokens, 0
    if case.family == "mechanism":
        module = create_mechanism(case.mechanism, num_heads=case.H, head_dim=case.K, causal=case.causal)
        forward = case.B * module.flops(case.T)
        return forward, 2 * forward
    if case.causal:
        return (4 * K * V + (L + 1) * (K + V)) * tokens, (10 * K * V + (L + 1) * (3 * K + 2 * V)) * tokens
    if case.decay == "none":
        return 4 * K * V * tokens, 8 * K * V * tokens
    return (8 * K * V + 2 * L * (K + V)) * tokens, (20 * K * V + 2 * L * (3 * K + 2 * V)) * tokens


def size(tensors: Tensors) -> int:
    """Bytes of all tensors; parameters are only a few kilobytes, but they are read."""
    return sum(t.nbytes for t in tensors.values())


def output_bytes(case: Problem, tensors: Tensors) -> int:
    """Bytes of the output, which is shaped like v or x; a step also writes its state."""
    names = ("x",) if case.family == "convolution" else ("v", *CONSTANT)
    return size({name: t for name, t in tensors.items() if name in names})


def qkvo_bytes(case: Problem, tensors: Tensors) -> int:
    """The reference for extra memory: q, k, v and the output, or x and the output; also a step's state."""
    large = {name: t for name, t in tensors.items() if name in ("q", "k", "v", "x", "kv")}
    return size(large) + output_bytes(case, tensors)
