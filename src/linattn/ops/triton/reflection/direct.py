"""Operators by a shorter way: the dispatcher of a registered one takes as much time as a short kernel."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Function = Callable[..., Any]


def shortest(operator: Function, forward: Function, backward: Function, remember: Function, gradients: Function) -> Any:
    """A function that does what the operator does: by its name where something watches, else by its own means.

    ``forward`` and ``backward`` are what the operator and that of its gradient do, ``remember(ctx, inputs, output)``
    and ``gradients(ctx, *gradients, run)`` are registered with it.
    """

    class Directly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):  # type: ignore[no-untyped-def]
            # Not with a setup_context: for that one PyTorch inspects the signature in every call.
            found = forward(*arguments)
            remember(ctx, arguments, found)
            return found

        @staticmethod
        @once_differentiable
        def backward(ctx, *of_outputs):  # type: ignore[no-untyped-def]
            return gradients(ctx, *of_outputs, run=backward)

    def run(*arguments: Any) -> Any:
        watched = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
        if watched or any(isinstance(x, Tensor) and type(x) not in (Tensor, nn.Parameter) for x in arguments):
            return operator(*arguments)
        return Directly.apply(*arguments) if torch.is_grad_enabled() else forward(*arguments)

    return run
