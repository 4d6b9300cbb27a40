"""A training step, and how it is compiled and run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from linattn.lab.bench.models.cases import SOFTMAX, ModelCase
from linattn.lab.bench.models.hosts import Host
from linattn.support.compiling import safe_options

COMPILED, GRAPH, REDUCED, EAGER_GRAPH = "compiled", "cuda-graph", "reduce-overhead", "eager-graph"
MODES = (COMPILED, GRAPH, REDUCED, EAGER_GRAPH)
ANY_SOFTMAX = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
Step = Callable[[], tuple[Tensor | None, ...]]


def code_of(mode: str) -> str:
    """The mode whose code a mode runs: a CUDA graph of the compiled step runs the compiled step."""
    return COMPILED if mode == GRAPH else mode


def compile_host(host: Host, mode: str, backend: str) -> Callable[[Tensor, Tensor], Tensor]:
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
    host: Host, loss_of: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor, autocast: bool
) -> Step:
    """Forward, loss and backward; loss and gradients of all parameters are returned, not stored."""
    parameters = list(host.parameters())

    def step() -> tuple[Tensor | None, ...]:
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of(inputs, targets)
        return loss.detach(), *torch.autograd.grad(loss, parameters, allow_unused=True)

    return step


def marked(step: Step) -> Step:
    """Mark where a step begins for PyTorch's own graphs: what the last one returned may be overwritten."""

    def begun() -> tuple[Tensor | None, ...]:
        torch.compiler.cudagraph_mark_step_begin()
        return step()

    return begun


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which all eager steps run and are captured, as workspaces of libraries belong to a stream."""
    return torch.cuda.Stream(device)


def run_aside(step: Step, device: torch.device) -> Step:
    """Run the step on :func:`side_stream`, where a capture needs some runs before it.

    The caller must wait for the device before it reads what the step returned.
    """
    if device.type != "cuda":
        return step
    stream = side_stream(device)

    def aside() -> tuple[Tensor | None, ...]:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            return step()

    return aside


def flash_only(case: ModelCase, mechanism: str, device: torch.device) -> AbstractContextManager[object]:
    """Allow only PyTorch's flash kernel for softmax, so that no other kernel replaces it unnoticed.

    In a backbone PyTorch may take the fastest that serves: windows with a bias of positions have no flash kernel.
    """
    if mechanism == SOFTMAX and device.type == "cuda" and case.kind != "backbone":
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION])
    return nullcontext()
