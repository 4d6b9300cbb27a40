"""The two measured passes: forward as in inference, and forward with backward as in training."""

from collections.abc import Callable

import torch
from torch import Tensor

from linattn.lab.bench.contenders import Contender, Run
from linattn.lab.bench.inputs import Inputs

FORWARD, TRAINING = "forward", "forward+backward"


def values(run: Run, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        return run(inputs)


def values_and_gradients(
    run: Run, inputs: Inputs, uses: tuple[str, ...], grad_output: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of the inputs that are used, which must be leaves that require one."""
    leaves = {name: t for name, t in inputs.tensors().items() if name in uses}
    output = run(inputs)
    gradients = torch.autograd.grad(output, list(leaves.values()), grad_output)
    return output.detach(), dict(zip(leaves, gradients, strict=True))


def grad_like(inputs: Inputs, seed: int) -> Tensor:
    """A fixed random gradient of the output, which is shaped like v."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(inputs.v.shape, generator=generator).to(inputs.v)


def make_call(contender: Contender, inputs: Inputs, pass_name: str, grad_output: Tensor) -> Callable[[], object]:
    """The call that is timed: no copies, no checks, only the pass itself."""
    if pass_name == FORWARD:
        return lambda: values(contender.run, inputs)
    leaves = inputs.copies(requires_grad=True)
    return lambda: values_and_gradients(contender.run, leaves, contender.uses, grad_output)


def make_fresh_call(contender: Contender, inputs: Inputs, pass_name: str) -> Callable[[], object]:
    """The call whose memory is measured: the same pass with inputs of its own, so that they count too."""
    used = inputs.map(lambda name, t: t if name in contender.uses else t[:0])

    def call() -> object:
        own = used.copies(requires_grad=pass_name == TRAINING)
        if pass_name == FORWARD:
            return values(contender.run, own)
        grad_output = torch.ones_like(own.v)
        return values_and_gradients(contender.run, own, contender.uses, grad_output)

    return call
