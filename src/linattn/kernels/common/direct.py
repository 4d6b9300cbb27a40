"""Calls of operators past PyTorch's dispatcher, which takes as much time as a short kernel."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Function = Callable[..., Any]
UNTRACED = frozenset((Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype))


def shortest(operator: Function, forward: Function, backward: Function, remember: Function, gradients: Function) -> Any:
    """A function that does what the operator does: it calls the operator if something traces it, else the functions.

    ``forward`` and ``backward`` are the functions of the operator and of the operator of its gradient;
    ``remember(ctx, inputs, output)`` and ``gradients(ctx, *gradients, run)`` are registered with it, where ``run`` is
    the operator of the gradient unless given.
    """

    class Directly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):  # type: ignore[no-untyped-def]
            # Without setup_context, for which PyTorch would inspect the signature in every call.
            found = forward(*arguments)
            remember(ctx, arguments, found)
            return found

        @staticmethod
        def backward(ctx, *of_outputs):  # type: ignore[no-untyped-def]
            # Gradients that may be differentiated again come from the operator, which raises an error if they are.
            return gradients(ctx, *of_outputs) if torch.is_grad_enabled() else gradients(ctx, *of_outputs, run=backward)

    def run(*arguments: Any) -> Any:
        if is_traced(arguments):
            return operator(*arguments)
        return Directly.apply(*arguments) if torch.is_grad_enabled() else forward(*arguments)

    return run


def is_traced(arguments: tuple[Any, ...]) -> bool:
    """Whether a compiler, a mode, a transform of ``torch.func`` or a subclass of tensors wants to see the operator."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch._C._are_functorch_transforms_active():
        return True
    return not UNTRACED.issuperset(map(type, arguments))
