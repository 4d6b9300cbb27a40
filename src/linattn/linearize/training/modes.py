"""Modules that are as a stage needs them for a while, and afterwards as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def learning(cores: nn.Module) -> Iterator[None]:
    """Parameters that take gradients, and afterwards are as they were."""
    before = [(parameter, parameter.requires_grad) for parameter in cores.parameters()]
    cores.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, wanted in before:
            parameter.requires_grad_(wanted)
            parameter.grad = None


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Dropout would make the teacher another one at each step."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
