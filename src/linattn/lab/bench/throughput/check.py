"""Checks a compiled step in two ways, both with ``err <= 2 (err(plain) + eps)``.

The first layers, at the length and batch size that is timed: loss and gradients against attention in plain PyTorch in
fp32 (fp64 on a CPU), by kind of parameter, where plain is that model in the precision that is measured. All layers: the
loss against the same model in fp32, not compiled, where plain is that model in the precision that is measured. Plain
PyTorch takes seconds for a layer of a long sequence; layers share compiled code, so two of them stand for all.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from linattn.lab.bench.language.model import TextModel, create_model
from linattn.lab.bench.models.check import by_kind, distances
from linattn.lab.bench.models.steps import ANY_SOFTMAX, make_step
from linattn.lab.bench.oracle import Verdict
from linattn.lab.bench.throughput.settings import ThroughputConfig

LAYERS = 2


def check_training(
    model: TextModel, mechanism: str, inputs: Tensor, targets: Tensor, config: ThroughputConfig
) -> Verdict:
    """The worse of both checks, by the share of its budget."""
    verdicts = [
        check_loss(model, inputs, targets, config.autocast),
        *check_gradients(model, mechanism, inputs, targets, config),
    ]
    return max(verdicts, key=lambda v: (not v.ok, v.error / v.budget))


def check_loss(model: TextModel, inputs: Tensor, targets: Tensor, autocast: bool) -> Verdict:
    """Check the loss of all layers; a loss that is not finite has the error NaN, which no budget allows."""
    found = loss_of(model, inputs, targets, autocast).item()  # with a graph for gradients: the code that is timed
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), sdpa_kernel(ANY_SOFTMAX):
        plain = loss_of(model, inputs, targets, autocast).item()
        exact = loss_of(model, inputs, targets, autocast=False).item()
    budget = 2 * (abs(plain - exact) / abs(exact) + eps_of(autocast))
    error = abs(found - exact) / abs(exact)
    return Verdict(error <= budget, "loss", error, budget, f"fp32, not compiled, {len(model.blocks)} layers")


def check_gradients(
    model: TextModel, mechanism: str, inputs: Tensor, targets: Tensor, config: ThroughputConfig
) -> list[Verdict]:
    """Check the first layers: one verdict for the loss and for every kind of parameter."""
    on_cpu = inputs.device.type == "cpu"
    with shortened(model, LAYERS):
        found = by_kind(model, make_step(model, model, inputs, targets, config.autocast)())
        depth = len(model.blocks)
        other = create_model(config.size, mechanism, inputs.device, config.seed, impl="chunked", depth=depth)
        other.load_state_dict(model.state_dict())
    with sdpa_kernel(ANY_SOFTMAX):
        plain = by_kind(other, make_step(other, other, inputs, targets, config.autocast)())
        other = other.double() if on_cpu else other
        exact = by_kind(other, make_step(other, other, inputs, targets, autocast=False)())
    errors, allowed = distances(found, exact), distances(plain, exact)
    against = f"{'fp64' if on_cpu else 'fp32'}, plain PyTorch, {depth} layers"
    budgets = {name: 2 * (own + eps_of(config.autocast)) for name, own in allowed.items()}
    return [Verdict(errors[n] <= budgets[n], n, errors[n], budgets[n], against) for n in exact]


def loss_of(model: TextModel, inputs: Tensor, targets: Tensor, autocast: bool) -> Tensor:
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=autocast):
        return model(inputs, targets)


@contextmanager
def shortened(model: TextModel, layers: int) -> Iterator[None]:
    """Reduce the model to its first layers, compiled as they are."""
    whole = model.blocks
    model.blocks = whole[:layers]
    try:
        yield
    finally:
        model.blocks = whole


def eps_of(autocast: bool) -> float:
    return torch.finfo(torch.bfloat16 if autocast else torch.float32).eps
