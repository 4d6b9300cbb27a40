"""The contracts that every mechanism keeps, as functions: use them to test your own mechanism.

    >>> import linattn.testing
    >>> report = linattn.testing.check_mechanism("elu", contracts=["causality", "scaling"])
    >>> sorted(report.counts)
    ['causality', 'scaling']

Each contract is also a function of its own, ``check_forms(mechanism)`` and so on. A mechanism that breaks one raises
:class:`ContractViolation`, which names the contract and the case and says by how much it is broken.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from linattn.mechanisms.base import Mechanism
from linattn.ops.shared.call import FORMS
from linattn.testing.bad_input import check_bad_input
from linattn.testing.calls import check_compile, check_scaling
from linattn.testing.cases import Subject, subject_of
from linattn.testing.forms import check_forms, check_gradients, check_precision
from linattn.testing.poison import check_poison, poisoned_allocations
from linattn.testing.sequences import check_causality, check_hand_over, check_padding
from linattn.testing.violation import ContractViolation

_CHECKS = (
    check_forms, check_causality, check_padding, check_hand_over, check_precision, check_gradients, check_compile,
    check_poison, check_scaling, check_bad_input,
)  # fmt: skip
CONTRACTS: Mapping[str, Callable[[Subject], list[str]]] = {
    check.__name__.removeprefix("check_"): check for check in _CHECKS
}

__all__ = [
    "CONTRACTS",
    "ContractReport",
    "ContractViolation",
    "check_bad_input",
    "check_causality",
    "check_compile",
    "check_forms",
    "check_gradients",
    "check_hand_over",
    "check_mechanism",
    "check_padding",
    "check_poison",
    "check_precision",
    "check_scaling",
    "poisoned_allocations",
    "subject_of",
]


@dataclass(frozen=True)
class ContractReport:
    """The cases of each contract that a mechanism passed; ``print`` shows how many."""

    mechanism: str
    passed: Mapping[str, Sequence[str]]

    @property
    def counts(self) -> dict[str, int]:
        return {contract: len(cases) for contract, cases in self.passed.items()}

    def __str__(self) -> str:
        kept = {contract: count for contract, count in self.counts.items() if count}
        lines = [f"{self.mechanism} keeps {len(kept)} contracts"]
        lines += [f"  {contract:<11} {count:>4} cases" for contract, count in kept.items()]
        lines += [f"  {contract:<11} does not apply" for contract in self.counts if contract not in kept]
        return "\n".join(lines)


def check_mechanism(
    mechanism: str | type[Mechanism],
    contracts: Sequence[str] | None = None,
    *,
    declares: Mapping[str, Any] | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    impls: tuple[str, ...] = (*FORMS, "auto"),
    **options: Any,
) -> ContractReport:
    """Check a mechanism against the contracts that apply to what it declares.

    Args:
        mechanism: a registered name, or a class, registered or not.
        contracts: names from :data:`CONTRACTS`; None: all.
        declares: for a class that is not registered, the arguments that ``register_mechanism`` would be given
            (``causal``, ``bidirectional``, ``state``, ``cost``, ``uses_input``); its defaults apply to the others.
        device: device to run on.
        dtype: in fp64 the forms are compared directly; in lower precision, which kernels need, their errors must stay
            within a budget.
        impls: the forms to check, e.g. ``("triton",)`` with ``device="cuda"`` and ``dtype=torch.float32``.
        options: options to build the mechanism with, e.g. ``head_dim=16``.

    Raises:
        ContractViolation: at the first case that fails.
    """
    for name in contracts or ():
        if name not in CONTRACTS:
            raise ValueError(f"contracts must be of {', '.join(CONTRACTS)}, got {name!r}")
    subject = subject_of(mechanism, declares, device=device, dtype=dtype, impls=impls, **options)
    chosen = CONTRACTS if contracts is None else contracts
    return ContractReport(subject.info.name, {name: CONTRACTS[name](subject) for name in chosen})
