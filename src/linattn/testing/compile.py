"""Contract: a call compiles into one graph and gives the same results as without compilation."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from linattn.mechanisms.base import Mechanism
from linattn.testing.cases import Call, Subject, attend, evaluate, subject_of
from linattn.testing.hand_over import in_pieces, step_by_step
from linattn.testing.violation import ContractViolation

LENGTH = 70
CALLS = ("masked", "packed", "with state", "step")


def check_compile(
    mechanism: str | type[Mechanism] | Subject, backend: str = "aot_eager", calls: Sequence[str] = CALLS
) -> list[str]:
    """Check that ``torch.compile(fullgraph=True)`` equals eager mode: masked, packed, with a state, and one step.

    The default backend traces and partitions like the real one, but without the minutes of code generation.
    """
    subject, passed = subject_of(mechanism), []
    for causal in subject.modes:
        built = subject.build(causal)
        inputs = subject.inputs(built, LENGTH)
        chosen = {kind: call for kind, call in _calls(subject, causal, LENGTH).items() if kind in calls}
        for kind, call in chosen.items():
            own = inputs.row(0) if kind == "packed" else inputs.tokens(slice(0, 1)) if kind == "step" else inputs
            case = f"{'causal' if causal else 'bidirectional'}, {kind}, {backend}"
            torch.compiler.reset()
            compiled: Callable[..., Any] = torch.compile(call, fullgraph=True, backend=backend)
            try:
                found = evaluate(built, own, compiled)
            except Exception as error:
                raise ContractViolation("compile", case, f"{type(error).__name__}: {error}") from error
            subject.standard(built, own, call).hold("compile", case, found)
            passed.append(case)
    torch.compiler.reset()
    return passed


def _calls(subject: Subject, causal: bool, length: int) -> dict[str, Call]:
    device = subject.device
    mask = torch.arange(length, device=device).expand(2, -1) < torch.tensor([[length], [40]], device=device)
    calls: dict[str, Call] = {
        "masked": partial(attend, key_mask=mask),
        "packed": partial(attend, cu_seqlens=torch.tensor([0, 3, length], device=device)),
    }
    if causal and subject.has_state:
        calls |= {"with state": partial(in_pieces, cuts=(30,)), "step": step_by_step}
    return calls
