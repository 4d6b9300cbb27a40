"""Checks outputs and gradients of contenders against fp64, in the run that times them.

The oracle is the quadratic form in fp64 or, where that does not fit into memory, the linear-time form in fp64.

The budget comes from data: ``err <= 2 (err(plain) + eps max(abs(ref)))``, where plain is the quadratic form in the
contender's dtype. A contender with its own plain twin (the recurrence) gets the larger error of the two. Beyond the
lengths at which the quadratic form fits, the error of plain, relative to max(abs(ref)), is that of the longest prefix
for which it does; sums are longer there, and the budget is four times as large.
"""

import torch
from torch import Tensor

from linattn.lab.bench.check import Verdict, budgets_of, judge, relative_errors
from linattn.lab.bench.contenders import Contender, Function, Inputs, Run, evaluate
from linattn.lab.bench.memory import free_bytes, peak_bytes

PROBE_LENGTH = 64
MOST_BYTES = 4 * 2**30
EXACT, SLACK_BEYOND = "fp64", 4.0
Errors = dict[str, float]


class Oracle:
    """The exact values of functions for one set of inputs, computed when they are first needed."""

    def __init__(self, inputs: Inputs, grad: Tensor | None) -> None:
        self.inputs, self.grad = inputs, grad
        self._known: dict[str, tuple[dict[str, Tensor], Errors, str]] = {}

    def check(self, contender: Contender) -> Verdict:
        """Compare the output and, if there is a gradient of it, the gradients."""
        function, uses = contender.function, contender.uses
        if function.name not in self._known:
            self._known[function.name] = self._exact(function, uses)
        exact, plain, against = self._known[function.name]
        if contender.plain is not None:
            twin = relative_errors(self._run(contender.plain, self.inputs, uses), exact)
            plain = {name: max(error, twin[name]) for name, error in plain.items()}
        errors = relative_errors(self._run(contender.run, self.inputs, uses), exact)
        slack = 1.0 if against == EXACT else SLACK_BEYOND
        budgets = {name: slack * own for name, own in budgets_of(plain, self.inputs.q.dtype).items()}
        return judge(errors, budgets, against)

    def _exact(self, function: Function, uses: tuple[str, ...]) -> tuple[dict[str, Tensor], Errors, str]:
        """Exact values, the relative errors of plain, and in words what was compared."""
        T, longest = self.inputs.length, self._longest_quadratic(function, uses)
        short = self.inputs.first(min(T, longest))
        exact = self._run(function.quadratic, short.to(torch.float64), uses)
        plain = relative_errors(self._run(function.quadratic, short, uses), exact)
        if longest >= T:
            return exact, plain, EXACT
        return self._run(function.linear_time, self.inputs.to(torch.float64), uses), plain, "fp64 in linear time"

    def _longest_quadratic(self, function: Function, uses: tuple[str, ...]) -> int:
        """The longest prefix that fits, by the memory of a short one, which grows with T^2 at most: a safe guess."""
        device, length = self.inputs.q.device, min(PROBE_LENGTH, self.inputs.length)
        short = self.inputs.first(length).to(torch.float64)
        peak = peak_bytes(lambda: self._run(function.quadratic, short, uses), device)
        most = min(MOST_BYTES, free_bytes(device) // 2)
        return max(length, int(length * (most / max(peak, 1)) ** 0.5))

    def _run(self, run: Run, inputs: Inputs, uses: tuple[str, ...]) -> dict[str, Tensor]:
        if self.grad is None:
            return evaluate(run, inputs, uses, None)
        grad = self.grad[:, :, : inputs.length].to(inputs.v)
        return evaluate(run, inputs.copies(requires_grad=True), uses, grad)
