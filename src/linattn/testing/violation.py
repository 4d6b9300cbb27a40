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

    def __init__(self, contract: str, case: str, what: str) -> None:
        super().__init__(f"contract {contract!r} is broken in the case {case!r}: {what}")
        self.contract = contract
        self.case = case


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; infinite where only one of the two is finite."""
    if found.numel() == 0:
        return 0.0
    difference = (found.detach().double() - expected.detach().double()).abs().max().item()
    return difference if difference == difference else float("inf")


def largest(x: Tensor) -> float:
    return x.detach().abs().max().item() if x.numel() else 0.0


def compare(
    contract: str,
    case: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    allowed: float = EXACT,
) -> None:
    """Raise unless every tensor equals that of the same name, to ``allowed`` times its largest value (at least 1)."""
    _same_shapes(contract, case, found, expected)
    for name, value in expected.items():
        limit = allowed * max(1.0, largest(value))
        error = distance(found[name], value)
        if not error <= limit:
            raise ContractViolation(contract, case, f"{name} differs by {error:.3g}, allowed {limit:.3g}")


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

    def hold(self, contract: str, case: str, found: Mapping[str, Tensor], allowed: float = EXACT) -> None:
        """Raise unless ``err(found) <= 2 (err(plain) + eps max(abs(expected), 1))`` for every tensor.

        The bound is multiplied by the root of the tokens in ``summed``. An error is the largest difference from
        ``expected``. Without ``plain`` the results are compared directly. Where the terms of a gradient cancel, as for
        a single query and key under a normaliser, the rounding of the terms is left, and counts as an error of
        ``plain``.
        """
        if not self.plain:
            compare(contract, case, found, self.expected, allowed)
            return
        _same_shapes(contract, case, found, self.expected)
        for name, value in self.expected.items():
            cost = max(self.rests.get(name, 0.0), *(distance(other[name], value) for other in self.plain))
            size = largest(value)
            budget = 2 * (cost + self.eps * max(1.0, size)) * self.summed.get(name, 1) ** 0.5
            error = distance(found[name], value)
            if not error <= budget:
                raise ContractViolation(contract, case, f"{name} has the error {error:.3g}, allowed {budget:.3g}")


def _same_shapes(contract: str, case: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    if found.keys() != expected.keys():
        raise ContractViolation(contract, case, f"found {sorted(found)}, expected {sorted(expected)}")
    for name, value in expected.items():
        if found[name].shape != value.shape:
            shapes = f"{tuple(found[name].shape)}, expected {tuple(value.shape)}"
            raise ContractViolation(contract, case, f"{name} has shape {shapes}")


def need_finite(contract: str, case: str, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        wrong = int((~torch.isfinite(value)).sum())
        if wrong:
            raise ContractViolation(
                contract, case, f"{name} has {wrong} of {value.numel()} values not finite, allowed 0"
            )
