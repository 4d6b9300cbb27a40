"""A training step of a model: how it is compiled, run, checked against plain PyTorch, and timed."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from linattn.lab.bench.benchmark import SOFTMAX
from linattn.lab.bench.check import Verdict, budgets_of, by_kind, distances, judge, watch_choices
from linattn.lab.bench.hosts import Host
from linattn.lab.bench.running import Absent, Row
from linattn.lab.bench.timing import Timing, by_events, capture, measure_in_turns
from linattn.mechanisms.base import Mechanism
from linattn.support.compiling import safe_options

COMPILED, GRAPH, REDUCED, EAGER_GRAPH = "compiled", "cuda-graph", "reduce-overhead", "eager-graph"
MODES = (COMPILED, GRAPH, REDUCED, EAGER_GRAPH)
BACKENDS = ("", "inductor", "aot_eager", "eager")
ANY_SOFTMAX = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
Step = Callable[[], tuple[Tensor | None, ...]]
Create = Callable[[str], Host]
Loss = Callable[[Tensor, Tensor], Tensor]


def compile_host(host: Host, mode: str, backend: str) -> Loss:
    """The function that gives the loss: compiled part by part, as a whole with PyTorch's CUDA graphs, or eager."""
    if mode == EAGER_GRAPH:
        return host
    options: dict[str, Any] = {"dynamic": False}
    if backend != "inductor":
        options["backend"] = backend
    elif mode == REDUCED:
        return torch.compile(host, options=safe_options() | {"triton.cudagraphs": True}, dynamic=False)
    else:
        options["options"] = safe_options()
    host.compile_parts(**options)
    return host


def make_step(
    host: Host, loss_of: Loss, inputs: Tensor, targets: Tensor, autocast: bool,
    marked: bool = False,
) -> Step:  # fmt: skip
    """Forward, loss and backward; loss and gradients of all parameters are returned, not stored.

    ``marked`` says where a step begins to PyTorch's own graphs: what the last one returned may be overwritten.
    """
    parameters = list(host.parameters())

    def step() -> tuple[Tensor | None, ...]:
        if marked:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of(inputs, targets)
        return loss.detach(), *torch.autograd.grad(loss, parameters, allow_unused=True)

    return step


def time_step(step: Step, mode: str, device: torch.device, milliseconds: float) -> Timing:
    if device.type != "cuda":
        return measure_in_turns({"": step}, device, min_seconds=0, min_repeats=3)[""]
    call = capture(step) if mode in (GRAPH, EAGER_GRAPH) else step
    if call is None:
        raise Absent("the step cannot be captured as a CUDA graph")
    return by_events(call, milliseconds)


def flash_only(mechanism: str, device: torch.device) -> AbstractContextManager[object]:
    """Allow only PyTorch's flash kernel for softmax, so that no other kernel replaces it unnoticed."""
    if mechanism == SOFTMAX and device.type == "cuda":
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION])
    return nullcontext()


def forms(host: Host, mechanism: str, inputs: Tensor, targets: Tensor, autocast: bool) -> Row:
    """Which form serves each call of attention in a forward pass without compilation, and whether all are kernels."""
    with (
        torch.no_grad(), torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=autocast),
        watch_choices() as choices,
    ):  # fmt: skip
        host(inputs, targets)
    modules = [module for module in host.modules() if isinstance(module, Mechanism)]
    if mechanism == SOFTMAX:
        return {"explain": {"scaled_dot_product_attention: softmax is PyTorch's": len(modules)}, "on_kernels": None}
    linear = sum(module.info.name != SOFTMAX for module in modules)  # a backbone's last stages are softmax
    served = len(choices) >= linear and all(choice.impl == "triton" for choice in choices)
    return {"explain": dict(Counter(map(str, choices))), "on_kernels": served}


@contextmanager
def shortened(host: Host, blocks: int | None) -> Iterator[None]:
    """Reduce a model to its first blocks, compiled as they are.

    At its start, with the output of attention normed by head, every block of a decoder amplifies rounding: after thirty
    blocks plain PyTorch in bf16 misses 0.2 to 3 of the gradient, after two 0.015.
    """
    whole = host.blocks
    host.blocks = whole[:blocks]
    try:
        yield
    finally:
        host.blocks = whole


class StepTruth:
    """Loss and gradients of the same model with attention in plain PyTorch, in fp32, on a CPU in fp64.

    ``err <= 2 (err(plain) + eps)``, with plain that model in the precision that is measured. Errors are norms of
    differences over the norm of the exact values, by kind of parameter and for all blocks together.

    Args:
        create: makes the model with a form of its mechanism: ``"chunked"`` is plain PyTorch.
        blocks: how many of the first blocks are checked; None: all.
        piece: sequences or images at a time, so that what eager code keeps in fp32 fits; BatchNorm needs all.
    """

    def __init__(
        self, create: Create, mechanism: str, inputs: Tensor, targets: Tensor, autocast: bool, *, blocks: int | None,
        piece: int, words: str,
    ) -> None:  # fmt: skip
        self.inputs, self.targets, self.autocast, self.blocks, self.piece = inputs, targets, autocast, blocks, piece
        self.exact_dtype = torch.float64 if inputs.device.type == "cpu" else torch.float32
        self.against = f"{'fp64' if inputs.device.type == 'cpu' else 'fp32'}, {words}"
        host = create("auto" if mechanism == SOFTMAX else "chunked")
        with shortened(host, blocks):
            plain = by_kind(host, self._gradients(host, autocast))
            # cuDNN rounds to tf32 and takes seconds for its plans for every new shape.
            with torch.backends.cudnn.flags(enabled=False, allow_tf32=False):
                self.exact = by_kind(host, self._gradients(host.to(self.exact_dtype), False))
        dtype = torch.bfloat16 if autocast else torch.float32
        self.budgets = budgets_of(distances(plain, self.exact), dtype)

    def check(self, host: Host, loss_of: Loss) -> Verdict:
        """Check a step of a host, of its first blocks alone; ``loss_of`` is what :func:`compile_host` made of it."""
        with shortened(host, self.blocks):
            step = make_step(host, loss_of, self.inputs, self.targets, self.autocast, marked=loss_of is not host)
            return judge(distances(by_kind(host, step()), self.exact), self.budgets, self.against)

    def _gradients(self, host: Host, autocast: bool) -> list[Tensor | None]:
        total: list[Tensor | None] = []
        for inputs, targets in zip(self.inputs.split(self.piece), self.targets.split(self.piece), strict=True):
            inputs = inputs.to(next(host.parameters()).dtype) if inputs.is_floating_point() else inputs
            share = len(inputs) / len(self.inputs)
            with sdpa_kernel(ANY_SOFTMAX):
                own = [None if g is None else share * g for g in make_step(host, host, inputs, targets, autocast)()]
            total = [a if b is None or a is None else a + b for a, b in zip(total, own, strict=True)] if total else own
        return total
