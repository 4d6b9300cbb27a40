"""A contender bound to tensors: what is called, and how its layout differs from the common one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.lab.bench.kernels.cases import Case

Tensors = dict[str, Tensor]
Outputs = Tensor | tuple[Tensor, ...]


class Absent(Exception):  # noqa: N818, it is an answer and no error
    """Raised by a contender that cannot serve the case; the message says why."""


def _same(name: str, tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Bound:
    """A contender with its tensors; ``run()`` reads ``leaves``, which are in the contender's own layout.

    ``into`` converts a tensor from the common layout to the contender's, ``back`` converts an output or a gradient to
    the common one; the gradient of the output has the name ``output``.
    """

    leaves: Tensors
    run: Callable[[], Outputs]
    into: Callable[[str, Tensor], Tensor] = _same
    back: Callable[[str, Tensor], Tensor] = _same


@dataclass(frozen=True)
class Contender:
    """One line of the table. ``bind(case, tensors)`` gets tensors in the common layout and may raise Absent."""

    name: str
    bind: Callable[[Case, Tensors], Bound]
    group: str = "linattn"  # what --rivals names
    softmax: bool = False  # computes another function than the others, for comparison
    first_seconds: float = 20.0  # limit of its first call, which is stopped then
    compiles: bool = False  # its first call is long, but short once another process has compiled it
    at_reduced_size: bool = True  # also checked at reduced size, unless that compiles for minutes once more
    note: str = ""

    @property
    def ours(self) -> bool:
        return self.group == "linattn"


def forward_call(bound: Bound) -> Callable[[], Outputs]:
    """The call that is timed as ``forward``: inference, which keeps nothing for backward."""

    def call() -> Outputs:
        with torch.no_grad():
            return bound.run()

    return call


def training_call(bound: Bound, grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """The call timed as ``forward+backward``; the gradient of the output is fixed, in the contender's layout."""
    leaves = [leaf.requires_grad_() for leaf in bound.leaves.values()]
    own = bound.into("output", grad)

    def call() -> tuple[Tensor, ...]:
        output = bound.run()
        assert isinstance(output, Tensor)
        return output, *torch.autograd.grad(output, leaves, own)

    return call


def values(bound: Bound, grad: Tensor | None) -> Tensors:
    """Outputs by name in the common layout, and gradients if one of the output is given."""
    outputs = forward_call(bound)() if grad is None else training_call(bound, grad)()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if grad is None:
        names = ["output", *(f"state {i}" for i in range(len(outputs) - 1))]
    else:
        names = ["output", *(f"gradient of {name}" for name in bound.leaves)]
    return {name: bound.back(name, t.detach()) for name, t in zip(names, outputs, strict=True)}
