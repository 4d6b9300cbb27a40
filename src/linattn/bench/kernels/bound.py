"""A contender bound to tensors: what is called, and how its layout differs from the common one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.bench.kernels.cases import Case

Tensors = dict[str, Tensor]
Outputs = Tensor | tuple[Tensor, ...]


class Absent(Exception):  # noqa: N818, it is an answer and no error
    """This contender cannot serve the case here; the message says why."""


def _same(name: str, tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Bound:
    """``run()`` takes its tensors from ``leaves``, which are in the contender's own layout.

    ``into`` turns a tensor of the common layout into the contender's, ``back`` an output or a gradient of it into the
    common one; the gradient of the output is called ``output``.
    """

    leaves: Tensors
    run: Callable[[], Outputs]
    into: Callable[[str, Tensor], Tensor] = _same
    back: Callable[[str, Tensor], Tensor] = _same


@dataclass(frozen=True)
class Contender:
    """One line of the table. ``bind(case, tensors)`` gets tensors in the common layout and raises Absent if it must."""

    name: str
    bind: Callable[[Case, Tensors], Bound]
    group: str = "linattn"  # what --rivals names
    softmax: bool = False  # another function than the others', there as context
    first_seconds: float = 20.0  # what its first call may take; it is stopped then
    compiles: bool = False  # its first call is long, and short once another process has made it
    at_reduced_size: bool = True  # checked there too; not what would compile for minutes once more
    note: str = ""

    @property
    def ours(self) -> bool:
        return self.group == "linattn"


def forward_call(bound: Bound) -> Callable[[], Outputs]:
    """What is timed as ``forward``: inference, nothing is kept."""

    def call() -> Outputs:
        with torch.no_grad():
            return bound.run()

    return call


def training_call(bound: Bound, grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """What is timed as ``forward+backward``; the gradient of the output is fixed, in the contender's layout."""
    leaves = [leaf.requires_grad_() for leaf in bound.leaves.values()]
    own = bound.into("output", grad)

    def call() -> tuple[Tensor, ...]:
        output = bound.run()
        assert isinstance(output, Tensor)
        return output, *torch.autograd.grad(output, leaves, own)

    return call


def values(bound: Bound, grad: Tensor | None) -> Tensors:
    """Outputs by name and in the common layout, and the gradients if there is one of the output."""
    outputs = forward_call(bound)() if grad is None else training_call(bound, grad)()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if grad is None:
        names = ["output", *(f"state {i}" for i in range(len(outputs) - 1))]
    else:
        names = ["output", *(f"gradient of {name}" for name in bound.leaves)]
    return {name: bound.back(name, t.detach()) for name, t in zip(names, outputs, strict=True)}
