"""Contracts on numbers: all forms are one function, errors are as small as they can be, gradients are right."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call

from linattn.mechanisms.base import Mechanism
from linattn.ops.shared.call import FORMS
from linattn.testing.cases import (
    LENGTH,
    Inputs,
    Subject,
    attend,
    attend_with_state,
    contract,
    evaluate,
    random_like,
    trainable,
    values,
)
from linattn.testing.violation import ContractViolation, compare, distance, need_finite

# One and two tokens, lengths around a chunk of 64, several chunks with an incomplete last one.
LENGTHS = (1, 2, 63, 64, 65, 197, 300)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHORT = 20  # of what gradients are checked on


@contract
def check_forms(subject: Subject, lengths: Sequence[int] = LENGTHS) -> Iterator[str]:
    """Check that reference, recurrent, chunked and auto agree in fp64 to 1e-10, and kernels within their budget."""
    for causal in subject.modes:
        mode = "causal" if causal else "bidirectional"
        for grouped in subject.groupings(causal):
            heads = ", grouped heads" if grouped else ""
            for length in (LENGTH,) if grouped else lengths:
                yield from _agree(subject, causal, grouped, length, f"{mode}, T = {length}{heads}", False)
            if causal and subject.has_state:
                yield from _agree(subject, causal, grouped, LENGTH, f"with state, T = {LENGTH}{heads}", True)


def _agree(subject: Subject, causal: bool, grouped: bool, length: int, case: str, state: bool) -> Iterator[str]:
    forms = subject.forms(causal, grouped=grouped)
    call = attend_with_state if state else attend
    found = {impl: evaluate(built, subject.inputs(built, length), call) for impl, built in forms.items()}
    if not subject.exact:
        for impl, built in forms.items():
            yield subject.standard(built, subject.inputs(built, length), call).hold(f"{impl}, {case}", found[impl])
        return
    if len(forms) < 2:
        raise ContractViolation(case, f"found the forms {sorted(forms)}, two are needed to compare")
    oracle, *others = forms
    for impl in others:
        compare(f"{impl} against {oracle}, {case}", found[impl], found[oracle])
        yield f"{impl}, {case}"


@contract
def check_precision(subject: Subject, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[str]:
    """Check ``err(out) <= 2 (err(reference form in that dtype) + eps max(abs(exact)))``, with errors against fp64."""
    for causal in subject.modes:
        mode = "causal" if causal else "bidirectional"
        forms = subject.forms(causal, dtype=torch.float64)
        (oracle, plain), *_ = subject.forms(causal, dtype=torch.float64, impls=FORMS).items()
        for dtype in dtypes:
            for impl, built in forms.items():
                if impl == oracle or (impl == "recurrent" and dtype == torch.float32):
                    continue  # a loop rounds its state at every token: up to 1.06 times the budget was seen
                inputs = subject.inputs(plain, 150).change(lambda t, d=dtype: t.to(d))  # type: ignore[misc]
                yield _within_budget(plain, built, inputs, dtype, f"{mode}, {impl} against {oracle}, {dtype}")
        for impl, built in forms.items() if subject.exact else ():
            yield _no_hidden_rounding(subject, built, f"{mode}, {impl}, no rounding inside")


def _within_budget(plain: Mechanism, built: Mechanism, inputs: Inputs, dtype: torch.dtype, case: str) -> str:
    """Check one dtype. Inputs and parameters are rounded first, so that only the computation is judged."""
    low, rounded = (copy.deepcopy(mechanism).to(dtype) for mechanism in (plain, built))
    cost_of, found = (values(mechanism, inputs)["output"] for mechanism in (low, rounded))
    exact = values(low.double(), inputs.change(torch.Tensor.double))["output"]
    budget = 2 * (distance(cost_of, exact) + torch.finfo(dtype).eps * exact.abs().max().item())
    if found.dtype != dtype:
        raise ContractViolation(case, f"output is {found.dtype}, expected {dtype}")
    error = distance(found, exact)
    if not error <= budget:
        raise ContractViolation(case, f"error {error:.3g}, allowed {budget:.3g}")
    return case


def _no_hidden_rounding(subject: Subject, mechanism: Mechanism, case: str) -> str:
    """Check that fp64 inputs are computed with in fp64: moving an input by 1e-9 must change the output.

    If it were rounded to fp32 on the way, the output would change in steps of 6e-8, and moving by 1e-9 would change one
    value in fifty. Half of the values must change; some rightly do not (the first causal output of a weighted mean is
    its v).
    """
    inputs = subject.inputs(mechanism, 16)
    before = values(mechanism, inputs)["output"]
    for name, t in inputs.named.items():
        after = values(mechanism, replace(inputs, **{name: t + 1e-9 * random_like(t)}))["output"]
        moved = (after != before).double().mean().item()
        if not moved >= 0.5:
            what = f"{name} moved by 1e-9 moves {moved:.0%} of the output's values, allowed at least 50%"
            raise ContractViolation(case, f"fp64 is rounded on the way: {what}")
    return case


@contract
def check_gradients(subject: Subject) -> Iterator[str]:
    """Check gradients: finite for zero vectors, huge norms, equal tokens; else present, not zero and the true slope."""
    for label, _, built in subject.each_form():
        inputs = subject.inputs(built, SHORT)
        yield _present(built, inputs, f"{label}, generic data")
        if subject.exact:  # below fp64 a difference quotient says little; check_forms compares these gradients
            yield _slope(built, inputs, f"{label}, slope")
        for dtype in (torch.float64, torch.float32) if subject.exact else (subject.dtype,):
            cast = built.to(dtype)
            for kind, special in _special(inputs).items():
                found = evaluate(cast, special.change(lambda t, d=dtype: t.to(d)))  # type: ignore[misc]
                yield need_finite(f"{label}, {kind}, {dtype}", found)


def _special(inputs: Inputs) -> dict[str, Inputs]:
    zero, tokens = torch.zeros_like, torch.arange(SHORT, device=inputs.q.device)
    return {
        "all zero": inputs.change(zero),
        "zero q": replace(inputs, q=zero(inputs.q)),
        "zero k": replace(inputs, k=zero(inputs.k)),
        "a zero token": inputs.fill(tokens[None] == 3, 0.0),
        "huge q and k": replace(inputs, q=1e4 * inputs.q, k=1e4 * inputs.k),
        "equal tokens": inputs.tokens(0 * tokens),
    }


def _present(mechanism: Mechanism, inputs: Inputs, case: str) -> str:
    leaves = inputs.change(lambda t: t.clone().requires_grad_())
    output = attend(mechanism, leaves)["output"]
    wanted = leaves.named | trainable(mechanism)
    found = torch.autograd.grad((output * random_like(output)).sum(), list(wanted.values()), allow_unused=True)
    for name, gradient in zip(wanted, found, strict=True):
        if gradient is None:
            raise ContractViolation(case, f"{name} gets no gradient")
        if not gradient.count_nonzero():
            raise ContractViolation(case, f"the gradient of {name} is zero everywhere")
    return case


def _slope(mechanism: Mechanism, inputs: Inputs, case: str) -> str:
    """Check that the gradient along a random direction equals the central difference quotient.

    With a step of 1e-5 the quotient itself is right to about 1e-9: h^2 from its formula, eps / h from rounding.
    The best of three directions counts, because of kinks such as that of a ReLU at 0.
    """
    h, weight, worst = 1e-5, random_like(inputs.q), []
    gradients, parameters = evaluate(mechanism, inputs), trainable(mechanism)

    @torch.no_grad()
    def moved(step: float, seed: int) -> Tensor:
        i = inputs.change(lambda t: t + step * random_like(t, seed))
        own = {name: p + step * random_like(p, seed) for name, p in parameters.items()}
        output: Tensor = functional_call(mechanism, own, (i.q, i.k, i.v), {"x": i.x})
        return output

    for seed in (2, 3, 4):
        both = (inputs.named | parameters).items()
        expected = sum((gradients[f"gradient of {name}"] * random_like(t, seed)).sum().item() for name, t in both)
        quotient = ((moved(h, seed) - moved(-h, seed)) * weight).sum().item() / (2 * h)
        worst.append(abs(quotient - expected) / max(abs(expected), 1.0))
    if not min(worst) <= 1e-6:
        raise ContractViolation(case, f"gradient and slope differ by {min(worst):.3g}, allowed 1e-06")
    return case
