"""Contract: states, operations and memory grow with the sequence as declared, no more and no less."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from linattn.mechanisms.base import Mechanism
from linattn.testing.cases import Subject, attend, named_state, subject_of
from linattn.testing.hand_over import in_pieces
from linattn.testing.violation import EXACT, ContractViolation, distance

LENGTHS = (1, 5, 70)


def check_scaling(mechanism: str | type[Mechanism] | Subject) -> list[str]:
    """Check that ``state_size`` is true and that it, ``flops`` and the largest tensor made grow as declared."""
    subject = subject_of(mechanism)
    passed = _states(replace(subject, dtype=torch.float64))
    for causal in subject.modes:
        passed += _costs(subject, causal)
    return passed


def _states(subject: Subject) -> list[str]:
    declared = subject.info.state
    if not subject.info.causal:
        return []
    if not subject.has_state:
        return [_no_state_indeed(subject, "declaration")]
    built, passed = subject.build(True), []
    for length in LENGTHS:
        inputs, case = subject.inputs(built, length, batch=1), f"state after {length} tokens"
        state = named_state(built.with_state(inputs.q, inputs.k, inputs.v, x=inputs.x).state)
        real = sum(t.numel() for t in state.values())
        if built.state_size(length) != real:
            raise ContractViolation("scaling", case, f"state_size says {built.state_size(length)}, found {real}")
        passed.append(case)
    sizes = [built.state_size(length) for length in LENGTHS]
    growth = "constant" if len(set(sizes)) == 1 else "growing"
    if growth != declared:
        what = f"state {declared!r} is declared, but the sizes after {LENGTHS} tokens are {sizes}"
        raise ContractViolation("scaling", "declaration", what)
    return [*passed, "declaration"]


def _no_state_indeed(subject: Subject, case: str) -> str:
    """Check that there really is no state: declaring too little is wrong as well, as it would hide decoding."""
    built = subject.build(True)
    vars(built)["info"] = replace(subject.info, state="constant")
    inputs = subject.inputs(built)
    try:
        pieces = in_pieces(built, inputs, (33,))["output"]
    except Exception:  # any refusal shows that there is no state
        return case
    if distance(pieces, attend(built, inputs)["output"]) <= EXACT:
        raise ContractViolation("scaling", case, "a state can be handed over, but state='none' is declared")
    return case


def _costs(subject: Subject, causal: bool) -> list[str]:
    built, mode = subject.build(causal), "causal" if causal else "bidirectional"
    linear = subject.info.cost == "linear"
    one, two = built.flops(512), built.flops(1024)
    if (two == 2 * one) != linear or two < 2 * one:
        what = f"cost {subject.info.cost!r} is declared, but flops go from {one} to {two} when the tokens double"
        raise ContractViolation("scaling", f"{mode}, flops", what)
    if not linear:
        return [f"{mode}, flops"]
    small, large = (_largest_tensor(subject, built, length) for length in (512, 1024))
    if large > 2 * small:
        what = f"largest tensor goes from {small} to {large} when the tokens double, allowed {2 * small}"
        raise ContractViolation("scaling", f"{mode}, memory", what)
    return [f"{mode}, flops", f"{mode}, memory"]


def _largest_tensor(subject: Subject, mechanism: Mechanism, length: int) -> int:
    inputs = subject.inputs(mechanism, length, batch=1)
    with torch.no_grad(), _LargestTensor() as seen:
        attend(mechanism, inputs)
    return seen.numel


class _LargestTensor(TorchDispatchMode):
    """Records the size of the largest memory that holds an operator's result (a view counts its base)."""

    numel = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple | list) else (result,):
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return result
