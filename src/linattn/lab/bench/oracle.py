"""Checks outputs and gradients of contenders against fp64, in the run that times them.

The oracle is the quadratic form in fp64. If that does not fit into memory, it is the first possible of these:

- a causal function with a state: the quadratic form over short pieces, with the state handed from one to the next;
- a function that takes single queries: the quadratic form for some queries spread over the sequence, and all keys;
- another causal function: the quadratic form over the first tokens, which later ones cannot change;
- else the linear-time form in fp64, whose length-dependence the shorter rows check against the quadratic one.

The budget comes from data: ``err <= 2 (err(plain) + eps max(abs(ref)))``, where plain is the oracle's computation in
the contender's dtype. A contender with its own plain twin (the recurrence) gets the larger error of the two. Against
the linear-time form plain would judge itself, so its error, relative to max(abs(ref)), is taken from the longest prefix
for which the quadratic form fits.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from linattn.lab.bench.contenders import Contender, Function, Run
from linattn.lab.bench.inputs import Inputs
from linattn.lab.bench.memory import free_bytes, peak_bytes
from linattn.lab.bench.passes import values, values_and_gradients

PROBE_LENGTH = 64
MOST_BYTES = 4 * 2**30
PIECE = 256
QUERIES = 64
PREFIX = 1024


@dataclass(frozen=True)
class Verdict:
    """The tensor of a result that uses most of its budget; numbers are relative to its max(abs(ref))."""

    ok: bool
    worst: str
    error: float
    budget: float
    against: str


@dataclass(frozen=True)
class Way:
    """How an oracle is computed: for the rows ``index`` of the output, or for all of them."""

    label: str
    run: Run
    index: Tensor | None = None
    judges_itself: bool = False


@dataclass(frozen=True)
class Truth:
    """Exact tensors in fp64, and the error of the plain computation for each of them."""

    way: Way
    reference: dict[str, Tensor]
    plain_error: dict[str, float]


class Oracle:
    """The exact values of functions for one set of inputs; kept until the inputs change."""

    def __init__(self, inputs: Inputs, grad_output: Tensor, causal: bool, backward: bool) -> None:
        self.inputs, self.grad_output, self.causal, self.backward = inputs, grad_output, causal, backward
        self._truths: dict[str, Truth] = {}

    def check(self, contender: Contender, backward: bool) -> Verdict:
        """Compare the output and, if ``backward``, the gradients."""
        truth = self._truth(contender.function, contender.uses)
        index = truth.way.index
        found = self._evaluate(_at(contender.run, index), self.inputs, contender.uses, index, backward)
        plain_error = truth.plain_error
        if contender.plain is not None:
            twin = self._evaluate(_at(contender.plain, index), self.inputs, contender.uses, index, backward)
            plain_error = {n: max(plain_error[n], _distance(t, truth.reference[n])) for n, t in twin.items()}
        eps = torch.finfo(self.inputs.q.dtype).eps
        verdicts = []
        for name, value in found.items():
            reference = truth.reference[name]
            scale = reference.abs().max().item() or 1.0
            error = _distance(value, reference) / scale
            budget = 2 * (plain_error[name] / scale + eps)
            verdicts.append(Verdict(error <= budget, name, error, budget, truth.way.label))
        # NaN compares false and thus counts as wrong; among wrong tensors, or among right ones, the fullest budget is
        # shown.
        return max(verdicts, key=lambda v: (not v.ok, v.error / v.budget))

    def _truth(self, function: Function, uses: tuple[str, ...]) -> Truth:
        if function.name not in self._truths:
            longest = self._longest_quadratic(function, uses)
            way = self._way(function, longest)
            reference = self._evaluate(way.run, self.inputs.to(torch.float64), uses, way.index, self.backward)
            if way.judges_itself:
                errors = self._plain_error_of_prefix(function, uses, longest)
                errors = {name: e * reference[name].abs().max().item() for name, e in errors.items()}
            else:
                plain = self._evaluate(way.run, self.inputs, uses, way.index, self.backward)
                errors = {name: _distance(plain[name], reference[name]) for name in reference}
            self._truths[function.name] = Truth(way, reference, errors)
        return self._truths[function.name]

    def _way(self, function: Function, longest: int) -> Way:
        T, device = self.inputs.length, self.inputs.q.device
        if longest >= T:
            return Way("fp64", function.quadratic)
        if function.with_state is not None:
            piece = min(PIECE, longest)
            return Way(f"fp64 in pieces of {piece}", partial(in_pieces, function, piece))
        if function.rows is not None:
            index = self._some_queries()
            return Way(f"fp64 at {len(index)} queries", partial(_rows, function, index), index)
        if self.causal:
            prefix = min(PREFIX, longest)
            index = torch.arange(prefix, device=device)
            return Way(f"fp64, first {prefix} tokens", lambda inputs: function.quadratic(inputs.cut(0, prefix)), index)
        return Way("fp64 chunked", function.linear_time, judges_itself=True)

    def _some_queries(self) -> Tensor:
        """Some queries spread over the sequence and, if causal, also the first ones.

        The first see few keys, so their outputs and gradients are the largest: without them max(abs(ref)), and with it
        the budget, would be that of the small ones.
        """
        T, device = self.inputs.length, self.inputs.q.device
        spread = torch.linspace(0, T - 1, QUERIES, dtype=torch.float64).round().long()
        first = torch.arange(QUERIES if self.causal else 0)
        return torch.cat([first, spread]).unique().to(device)

    def _longest_quadratic(self, function: Function, uses: tuple[str, ...]) -> int:
        """The longest prefix that fits, by the memory of a short one, which grows with T^2 at most: a safe guess."""
        length = min(PROBE_LENGTH, self.inputs.length)
        short, device = self.inputs.cut(0, length).to(torch.float64), self.inputs.q.device
        grad = self.grad_output[:, :, :length]
        peak = peak_bytes(lambda: _results(function.quadratic, short, uses, grad, self.backward), device)
        allowed = min(MOST_BYTES, free_bytes(device) // 4)
        return max(length, int(length * (allowed / peak) ** 0.5))

    def _plain_error_of_prefix(self, function: Function, uses: tuple[str, ...], length: int) -> dict[str, float]:
        short, grad = self.inputs.cut(0, length), self.grad_output[:, :, :length]
        exact = _results(function.quadratic, short.to(torch.float64), uses, grad, self.backward)
        plain = _results(function.quadratic, short, uses, grad, self.backward)
        return {name: _distance(plain[name], ref) / (ref.abs().max().item() or 1.0) for name, ref in exact.items()}

    def _evaluate(
        self, run: Run, inputs: Inputs, uses: tuple[str, ...], index: Tensor | None, backward: bool
    ) -> dict[str, Tensor]:
        grad = self.grad_output if index is None else self.grad_output[:, :, index]
        return _results(run, inputs, uses, grad, backward)


def _results(run: Run, inputs: Inputs, uses: tuple[str, ...], grad: Tensor, backward: bool) -> dict[str, Tensor]:
    if not backward:
        return {"output": values(run, inputs)}
    output, gradients = values_and_gradients(run, inputs.copies(requires_grad=True), uses, grad.to(inputs.v))
    return {"output": output, **{f"gradient of {name}": g for name, g in gradients.items()}}


def _at(run: Run, index: Tensor | None) -> Run:
    """The same function, for only those rows of the output."""
    return run if index is None else lambda inputs: run(inputs)[:, :, index]


def _rows(function: Function, index: Tensor, inputs: Inputs) -> Tensor:
    assert function.rows is not None
    return function.rows(inputs, index)


def in_pieces(function: Function, piece: int, inputs: Inputs) -> Tensor:
    """Compute a causal function piece by piece; the weights of a piece are recomputed for its gradient, never kept."""
    assert function.with_state is not None
    outputs, state = [], None
    for start in range(0, inputs.length, piece):
        part = inputs.cut(start, start + piece)
        output, state = checkpoint(function.with_state, part, state, use_reentrant=False)
        outputs.append(output)
    return torch.cat(outputs, dim=2)


def _distance(a: Tensor, b: Tensor) -> float:
    return (a.double() - b).abs().max().item()
