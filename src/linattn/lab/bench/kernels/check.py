"""Checks outputs and gradients of a row against fp64, in the run that times it.

At a reduced size the exact values are those of the quadratic form in fp64, and the budget is
``err <= 2 (err(plain) + eps max(abs(exact)))``, with plain the same form in the dtype that is timed. A kernel may work
differently at the timed size, so it is checked there too, against the chunked form in fp64, at the first and last heads
of the first and last sequence; sums are longer there, and the budget is four times as large.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from linattn.lab.bench.kernels.bound import Bound, Contender, Tensors, values
from linattn.lab.bench.kernels.cases import Case
from linattn.lab.bench.kernels.contenders import bind_exact_softmax
from linattn.lab.bench.kernels.problems import PARAMETER, bind_form, draw
from linattn.lab.bench.oracle import Verdict

SLACK_AT_FULL_SIZE = 4.0
Bind = Callable[[Case, Tensors], Bound]


def grad_for(case: Case, tensors: Tensors, seed: int) -> Tensor:
    """A fixed random gradient of the output, which is shaped like v or x."""
    like = tensors["x" if case.family == "convolution" else "v"]
    generator = torch.Generator(like.device).manual_seed(seed + 1)
    return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)


class Truth:
    """The exact values of one case, computed when they are first needed."""

    def __init__(self, case: Case, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.case, self.small = case, case.reduced()
        self.device, self.dtype, self.seed = device, dtype, seed
        self.tensors = draw(self.small, device, dtype, seed + 2)
        self.grad = grad_for(self.small, self.tensors, seed + 2) if case.backward else None
        self._exact: dict[bool, Tensors] = {}
        self._budgets: dict[bool, dict[str, float]] = {}
        self._full: Tensors | None = None

    def check(self, contender: Contender, backward: bool) -> Verdict:
        """Check a contender at the reduced size."""
        exact, budgets = self._small(contender.softmax)
        found = values(contender.bind(self.small, self.tensors), self.grad if backward else None)
        return judge(found, exact, budgets, f"fp64, {self.small.shape}")

    def check_full(self, bound: Bound, tensors: Tensors, grad: Tensor, backward: bool) -> Verdict:
        """Check a contender at the size that is timed."""
        if self._full is None:
            wide = {name: t.double() for name, t in corners(self.case, tensors).items()}
            own = next(t for name, t in wide.items() if name in ("q", "x"))
            heads = own.shape[1] if self.case.family != "convolution" else self.case.H
            case = replace(self.case, B=own.shape[0], H=heads)
            form = "recurrent" if case.family == "step" else "chunked"
            own_grad = corners(self.case, {"output": grad})["output"].double() if case.backward else None
            exact = values(bind_form(form)(case, wide), own_grad)
            self._full = {name: t for name, t in exact.items() if not summed(self.case, name)}
        budgets = {name: SLACK_AT_FULL_SIZE * b for name, b in self._small(False)[1].items()}
        found = corners(self.case, values(bound, grad if backward else None))
        return judge(found, self._full, budgets, f"fp64, {self.case.shape}")

    def _small(self, softmax: bool) -> tuple[Tensors, dict[str, float]]:
        if softmax not in self._exact:
            bind: Bind = bind_exact_softmax if softmax else bind_form("reference")
            wide = {name: t.double() for name, t in self.tensors.items()}
            exact = values(bind(self.small, wide), None if self.grad is None else self.grad.double())
            plain = values(bind(self.small, self.tensors), self.grad)
            eps = torch.finfo(self.dtype).eps
            self._exact[softmax] = exact
            self._budgets[softmax] = {n: 2 * (relative_error(plain[n], exact[n]) + eps) for n in exact}
        return self._exact[softmax], self._budgets[softmax]


def corners(case: Case, tensors: Tensors) -> Tensors:
    """First and last sequences and heads, if these are computed independently; parameters stay whole.

    A mechanism may mix heads, and a convolution has none and sums over sequences: these tensors stay whole too.
    """
    if case.family == "convolution":
        return tensors
    first_and_last = {n: sorted({0, n - 1}) for n in (case.B, case.H)}

    def cut(name: str, t: Tensor) -> Tensor:
        if PARAMETER in name:
            return t
        if t.ndim == 1:  # a decay per head
            return t[first_and_last[case.H]]
        t = t[first_and_last[case.B]]
        return t if case.family == "mechanism" else t[:, first_and_last[case.H]]

    return {name: cut(name, t) for name, t in tensors.items()}


def summed(case: Case, name: str) -> bool:
    """Whether a tensor is a sum over all sequences, which cannot be checked on some of them."""
    return case.family == "mechanism" and PARAMETER in name


def judge(found: Tensors, exact: Tensors, budgets: dict[str, float], against: str) -> Verdict:
    """Verdict on the tensor that uses most of its budget; tensors without exact values are skipped."""
    verdicts = []
    for name, value in found.items():
        if name in exact:
            error = relative_error(value, exact[name])
            verdicts.append(Verdict(error <= budgets[name], name, error, budgets[name], against))
    # NaN compares false and thus counts as wrong; among wrong tensors, or among right ones, the fullest budget is
    # shown.
    return max(verdicts, key=lambda v: (not v.ok, v.error / v.budget))


def relative_error(value: Tensor, exact: Tensor) -> float:
    """Error relative to max(abs(exact))."""
    return (value.double() - exact).abs().max().item() / (exact.abs().max().item() or 1.0)
