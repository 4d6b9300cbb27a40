"""Contract: no memory is read before it is written."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from linattn.testing.cases import Subject, attend, attend_with_state, contract, evaluate
from linattn.testing.violation import need_finite


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill new memory, of ``torch.empty`` and all its relatives, with NaN (integers: the largest value).

    PyTorch fills it below Python, so custom operators and compiled code are covered too.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic  # its attribute is a property that type checkers do not see
    filled = deterministic.fill_uninitialized_memory
    try:
        # Warn only: the filling is what counts; an operator without a deterministic variant must still run.
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = filled


@contract
def check_poison(subject: Subject) -> Iterator[str]:
    """Check that outputs, states and gradients have no NaN in such memory and equal those in ordinary memory."""
    for case, _, built in subject.each_form():
        inputs = subject.inputs(built)
        call = attend_with_state if built.causal and subject.has_state else attend
        with poisoned_allocations():
            results = evaluate(built, inputs, call)
        need_finite(case, results)
        # The deterministic variant of an operator may sum in another order.
        yield subject.standard(built, inputs, call).hold(case, results, 1e-12)
