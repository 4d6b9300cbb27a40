"""How a contract says that it was broken."""

from collections.abc import Mapping

import torch
from torch import Tensor

# What rounding alone may do to fp64 results of size 1 that are summed in different orders.
EXACT = 1e-10


class ContractViolation(AssertionError):  # noqa: N818 - it reads as what it is
    """A mechanism does not keep a contract: which one, in which case, and by how much."""

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


def compare(
    contract: str,
    case: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    allowed: float = EXACT,
) -> None:
    """Every tensor equals its namesake, to ``allowed`` times its largest value (at least 1)."""
    if found.keys() != expected.keys():
        raise ContractViolation(contract, case, f"found {sorted(found)}, expected {sorted(expected)}")
    for name, value in expected.items():
        if found[name].shape != value.shape:
            shapes = f"{tuple(found[name].shape)}, expected {tuple(value.shape)}"
            raise ContractViolation(contract, case, f"{name} has shape {shapes}")
        size = value.detach().abs().max().item() if value.numel() else 0.0
        limit = allowed * max(1.0, size)
        error = distance(found[name], value)
        if not error <= limit:
            raise ContractViolation(contract, case, f"{name} differs by {error:.3g}, allowed {limit:.3g}")


def need_finite(contract: str, case: str, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        wrong = int((~torch.isfinite(value)).sum())
        if wrong:
            raise ContractViolation(
                contract, case, f"{name} has {wrong} of {value.numel()} values not finite, allowed 0"
            )
