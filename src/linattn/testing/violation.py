"""The error that a broken contract raises, and comparisons that raise it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Roundings of one number on its way through an attention: its map, a product, a sum, a division.
ROUNDINGS = 4
# The difference that rounding alone may cause between fp64 results of size 1 summed in different orders.
EXACT = 1e-10


class ContractViolation(AssertionError):  # noqa: N818 - it reads as what it is
    """Raised when a mechanism breaks a contract: says which one, in which case, and by how much."""

    contract = ""  # its name, told by the function that checks it

    def __init__(self, case: str, what: str) -> None:
        super().__init__(case, what)
        self.case, self.what = case, what

    def __str__(self) -> str:
        return f"contract {self.contract!r} is broken in the case {self.case!r}: {self.what}"


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; infinite where only one of the two is finite."""
    if found.numel() == 0:
        return 0.0
    difference = (found.detach().double() - expected.detach().double()).abs().max().item()
    return difference if difference == difference else float("inf")


def largest(x: Tensor) -> float:
    return x.detach().abs().max().item() if x.numel() else 0.0


def compare(case: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], allowed: float = EXACT) -> str:
    """The case, if every tensor equals that of the same name, to ``allowed`` times its largest value (at least 1)."""
    _same_shapes(case, found, expected)
    for name, value in expected.items():
        limit = allowed * max(1.0, largest(value))
        error = distance(found[name], value)
        if not error <= limit:
            raise ContractViolation(case, f"{name} differs by {error:.3g}, allowed {limit:.3g}")
    return case


@dataclass(frozen=True)
class Standard:
    """Results that others are compared with: directly, or in lower precision within a budget of errors."""

    expected: Mapping[str, Tensor]
    # Results of plain PyTorch in the same lower precision, also for inputs moved by a few roundings. The worst of them
    # counts: where a gradient is a single number, one result may be right by chance.
    plain: Sequence[Mapping[str, Tensor]] = ()
    eps: float = 0.0
    # How many tokens a gradient is summed over. A kernel that sums a decay's gradient along the sequence has the same
    # error at all tokens, plain PyTorch a different one at each; the former grow by the root of the number more.
    summed: Mapping[str, int] = field(default_factory=dict)
    # The rounding errors that are left of a gradient whose terms cancel.
    rests: Mapping[str, float] = field(default_factory=dict)

    def hold(self, case: str, found: Mapping[str, Tensor], allowed: float = EXACT) -> str:
        """The case, if ``err(found) <= 2 (err(plain) + eps max(abs(expected), 1))`` for every tensor.

        The bound is multiplied by the root of the tokens in ``summed``. An error is the largest difference from
        ``expected``. Without ``plain`` the results are compared directly. Where the terms of a gradient cancel, as for
        a single query and key under a normaliser, the rounding of the terms is left, and counts as an error of
        ``plain``.
        """
        if not self.plain:
            return compare(case, found, self.expected, allowed)
        _same_shapes(case, found, self.expected)
        for name, value in self.expected.items():
            cost = max(self.rests.get(name, 0.0), *(distance(other[name], value) for other in self.plain))
            budget = 2 * (cost + self.eps * max(1.0, largest(value))) * self.summed.get(name, 1) ** 0.5
            error = distance(found[name], value)
            if not error <= budget:
                raise ContractViolation(case, f"{name} has the error {error:.3g}, allowed {budget:.3g}")
        return case


def _same_shapes(case: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    shapes, wanted = ({name: tuple(x.shape) for name, x in results.items()} for results in (found, expected))
    if shapes != wanted:
        raise ContractViolation(case, f"found {shapes}, expected {wanted}")


def need_finite(case: str, values: Mapping[str, Tensor]) -> str:
    for name, value in values.items():
        if wrong := int((~torch.isfinite(value)).sum()):
            raise ContractViolation(case, f"{name} has {wrong} of {value.numel()} values not finite, allowed 0")
    return case
