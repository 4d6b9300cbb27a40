"""Contract: all forms of a mechanism are one function, in values and in every gradient."""

from collections.abc import Sequence

from linattn.mechanisms.base import Mechanism
from linattn.testing.cases import LENGTH, Subject, attend, attend_with_state, evaluate, subject_of
from linattn.testing.violation import ContractViolation, compare

# One and two tokens, lengths around a chunk of 64, several chunks with an incomplete last one.
LENGTHS = (1, 2, 63, 64, 65, 197, 300)


def check_forms(mechanism: str | type[Mechanism] | Subject, lengths: Sequence[int] = LENGTHS) -> list[str]:
    """Check that reference, recurrent, chunked and auto agree in fp64 to 1e-10, and kernels within their budget."""
    subject, passed = subject_of(mechanism), []
    for causal in subject.modes:
        mode = "causal" if causal else "bidirectional"
        for grouped in subject.groupings(causal):
            heads = ", grouped heads" if grouped else ""
            for length in (LENGTH,) if grouped else lengths:
                passed += _agree(subject, causal, grouped, length, f"{mode}, T = {length}{heads}", False)
            if causal and subject.has_state:
                passed += _agree(subject, causal, grouped, LENGTH, f"with state, T = {LENGTH}{heads}", True)
    return passed


def _agree(subject: Subject, causal: bool, grouped: bool, length: int, case: str, state: bool) -> list[str]:
    forms = subject.forms(causal, grouped=grouped)
    call = attend_with_state if state else attend
    if not subject.exact:
        for impl, built in forms.items():
            inputs = subject.inputs(built, length)
            found = evaluate(built, inputs, call)
            subject.standard(built, inputs, call).hold("forms", f"{impl}, {case}", found)
        return [f"{impl}, {case}" for impl in forms]
    if len(forms) < 2:
        raise ContractViolation("forms", case, f"found the forms {sorted(forms)}, two are needed to compare")
    (oracle, first), *others = forms.items()
    expected = evaluate(first, subject.inputs(first, length), call)
    for impl, other in others:
        found = evaluate(other, subject.inputs(other, length), call)
        compare("forms", f"{impl} against {oracle}, {case}", found, expected)
    return [f"{impl}, {case}" for impl, _ in others]
