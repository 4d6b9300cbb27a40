"""Context managers that put modules into the mode a stage needs, and restore them on exit."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def learning(cores: nn.Module) -> Iterator[None]:
    """Let all parameters take gradients; on exit they are as they were."""
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
    """Eval mode, restored on exit: with dropout the teacher would be another one at each step."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
