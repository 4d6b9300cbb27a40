"""Contract: every input and every parameter gets a gradient that is finite and right."""

from dataclasses import replace

import torch

from linattn.mechanisms.base import Mechanism
from linattn.testing.cases import Inputs, Subject, attend, evaluate, random_like, subject_of, trainable
from linattn.testing.violation import ContractViolation, need_finite

LENGTH = 20


def check_gradients(mechanism: str | type[Mechanism] | Subject) -> list[str]:
    """Check gradients: finite for zero vectors, huge norms, equal tokens; else present, not zero and the true slope."""
    subject, passed = subject_of(mechanism), []
    for label, _, built in subject.each_form():
        inputs = subject.inputs(built, LENGTH)
        passed.append(_present(built, inputs, f"{label}, generic data"))
        if subject.exact:  # below fp64 a difference quotient says little; check_forms compares these gradients
            passed.append(_slope(built, inputs, f"{label}, slope"))
        for dtype in (torch.float64, torch.float32) if subject.exact else (subject.dtype,):
            cast = built.to(dtype)
            for kind, special in _special(inputs).items():
                case = f"{label}, {kind}, {dtype}"
                need_finite("gradients", case, evaluate(cast, special.change(lambda t, d=dtype: t.to(d))))  # type: ignore[misc]
                passed.append(case)
    return passed


def _special(inputs: Inputs) -> dict[str, Inputs]:
    zero = torch.zeros_like
    device = inputs.q.device
    first = torch.tensor([0], device=device)
    return {
        "all zero": inputs.change(zero),
        "zero q": replace(inputs, q=zero(inputs.q)),
        "zero k": replace(inputs, k=zero(inputs.k)),
        "a zero token": inputs.fill(torch.arange(inputs.q.shape[2], device=device)[None] == 3, 0.0),
        "huge q and k": replace(inputs, q=1e4 * inputs.q, k=1e4 * inputs.k),
        "equal tokens": inputs.tokens(first.expand(inputs.q.shape[2])),
    }


def _present(mechanism: Mechanism, inputs: Inputs, case: str) -> str:
    leaves = inputs.change(lambda t: t.clone().requires_grad_())
    output = attend(mechanism, leaves)["output"]
    wanted = {**leaves.named, **trainable(mechanism)}
    found = torch.autograd.grad((output * random_like(output)).sum(), list(wanted.values()), allow_unused=True)
    for name, gradient in zip(wanted, found, strict=True):
        if gradient is None:
            raise ContractViolation("gradients", case, f"{name} gets no gradient")
        if not gradient.count_nonzero():
            raise ContractViolation("gradients", case, f"the gradient of {name} is zero everywhere")
    return case


def _slope(mechanism: Mechanism, inputs: Inputs, case: str) -> str:
    """Check that the gradient along a random direction equals the central difference quotient.

    With a step of 1e-5 the quotient itself is right to about 1e-9: h^2 from its formula, eps / h from rounding.
    The best of three directions counts, because of kinks such as that of a ReLU at 0.
    """
    h = 1e-5
    weight = random_like(inputs.q)
    gradients = evaluate(mechanism, inputs)
    parameters = trainable(mechanism)
    worst = []
    for seed in (2, 3, 4):
        expected = torch.zeros((), dtype=torch.float64)
        for name, t in (inputs.named | parameters).items():
            expected = expected + (gradients[f"gradient of {name}"] * random_like(t, seed)).sum()
        sides = [_moved(mechanism, inputs, sign * h, seed) for sign in (1, -1)]
        quotient = ((sides[0] - sides[1]) * weight).sum() / (2 * h)
        worst.append(((quotient - expected).abs() / expected.abs().clamp(min=1)).item())
    if not min(worst) <= 1e-6:
        raise ContractViolation("gradients", case, f"gradient and slope differ by {min(worst):.3g}, allowed 1e-06")
    return case


@torch.no_grad()
def _moved(mechanism: Mechanism, inputs: Inputs, step: float, seed: int) -> torch.Tensor:
    """The output with inputs and parameters moved along one direction; the parameters are restored afterwards."""
    parameters = trainable(mechanism)
    before = {name: p.clone() for name, p in parameters.items()}
    for p in parameters.values():
        p.add_(step * random_like(p, seed))
    output = attend(mechanism, inputs.change(lambda t: t + step * random_like(t, seed)))["output"]
    for name, p in parameters.items():
        p.copy_(before[name])
    return output
