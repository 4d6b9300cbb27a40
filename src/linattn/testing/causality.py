"""Contract: outputs of the past do not change when the future changes."""

from functools import partial

import torch

from linattn.mechanisms.base import Mechanism
from linattn.testing.cases import LENGTH, Inputs, Results, Subject, attend, evaluate, random_like, subject_of, values
from linattn.testing.violation import ContractViolation

CUTS = (1, 33, 64, LENGTH - 1)
# One expects equal bits; but a form may choose another order of summation.
SAME = 1e-12


def check_causality(mechanism: str | type[Mechanism] | Subject) -> list[str]:
    """Check that another future, even a huge one, does not change past outputs, and gets no gradient from them."""
    subject, passed = subject_of(mechanism), []
    if not subject.info.causal:
        return []
    for impl, built in subject.forms(True).items():
        inputs = subject.inputs(built)
        for cut in CUTS:
            past = partial(_past, cut=cut)
            standard = subject.standard(built, inputs, past, gradients=False)
            for size in (1.0, 1e3):
                case = f"{impl}, future from token {cut} changed by {size:g}"
                standard.hold("causality", case, values(built, _other_future(inputs, cut, size), past), SAME)
                passed.append(case)
            passed.append(_no_gradient(built, inputs, cut, f"{impl}, gradient from before token {cut}"))
    return passed


def _other_future(inputs: Inputs, cut: int, size: float) -> Inputs:
    future = torch.arange(inputs.q.shape[2], device=inputs.q.device) >= cut
    noise = inputs.change(lambda t: t + size * random_like(t, seed=2))
    mixed = {
        name: torch.where(future[:, None] if t.ndim == 4 else future[None, :, None], noise.named[name], t)
        for name, t in inputs.named.items()
    }
    return Inputs(**mixed)


def _past(mechanism: Mechanism, inputs: Inputs, cut: int) -> Results:
    return {"past": attend(mechanism, inputs)["output"][:, :, :cut]}


def _no_gradient(mechanism: Mechanism, inputs: Inputs, cut: int, case: str) -> str:
    results = evaluate(mechanism, inputs, partial(_past, cut=cut))
    for name, t in inputs.named.items():
        gradient = results[f"gradient of {name}"]
        leak = gradient[:, :, cut:] if t.ndim == 4 else gradient[:, cut:]
        if leak.count_nonzero():
            largest = leak.abs().max().item()
            raise ContractViolation("causality", case, f"gradient of {name} after it is {largest:.3g}, allowed 0")
    return case
