"""Stacks of models: what they compute, and that padding and neighbours do not matter."""

import pytest
import torch

from linattn.lab.theory.icl_models import (
    STACKS,
    AdaptedStack,
    Cell,
    LinearStack,
    TaskStream,
    fit,
    measure_risks,
    predict,
)
from linattn.lab.theory.icl_tasks import Curve, Gaussian

D, M = 3, 2


def generator():
    return torch.Generator().manual_seed(3)


def stack_of(name, tokens):
    stack = STACKS[name](M, D + 1, generator(), *[tokens] * (name == "h3"))
    if name == "gated":
        torch.nn.init.normal_(stack.gate, generator=generator())  # gates that look at their tokens
    return stack


def stream_of(*lengths):
    curve = Curve("", Gaussian(D, 0.1))
    return TaskStream([Cell(curve, n, 0) for n in lengths], generator())


def by_hand(name, stack, z, m):
    """One task ``(T, D+1)``, from the formula, token by token."""
    p = {key: value.detach()[m] for key, value in stack.named_parameters() if key != "taps"}
    T = len(z)
    if name == "canon":
        taps = stack.taps.detach().view(M, D + 1, 4)[m]
        z = torch.stack([z[t] + sum(taps[:, 3 - w] * z[t - w] for w in range(min(4, t + 1))) for t in range(T)])
    if name == "h3":
        product = (z @ p["key"]) * (z @ p["value"])
        return ((z[-1] @ p["query"]) * (p["filter"].unsqueeze(1) * product).sum(0)).sum()
    weights = torch.ones(T)
    if name == "gated":
        gates = torch.sigmoid(z @ p["gate"] + p["bias"].squeeze())
        weights = torch.stack([gates[t + 1 :].prod() for t in range(T)])
    return sum(weights[t] * (z[-1] @ p["query"]) @ (z[t] @ p["key"]) * (z[t] @ p["value"]) for t in range(T))


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_its_models_one_by_one(name):
    stack, tokens = stack_of(name, 6), stream_of(5, 5).draw(4)[0]
    expected = [[by_hand(name, stack, tokens[m, b], m) for b in range(4)] for m in range(M)]
    torch.testing.assert_close(stack(tokens), torch.tensor(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", STACKS)
def test_zeros_in_front_and_other_models_change_nothing(name):
    stack, tokens = stack_of(name, 6), stream_of(3, 5).draw(4)[0]
    assert not tokens[0, :, :2].any()
    assert tokens[0, :, 2:, :-1].all()
    before = stack(tokens)
    other = tokens.clone()
    other[1] = 100.0
    assert torch.equal(stack(other)[0], before[0])
    if name == "h3":
        stack.filter = torch.nn.Parameter(stack.filter[:, 2:])
    torch.testing.assert_close(stack(tokens[:, :, 2:])[0], before[0], rtol=1e-4, atol=1e-5)


def test_the_formulas_own_model_has_no_error():
    stream = stream_of(4, 6)
    optima = [cell.curve.optimum(cell.n) for cell in stream.cells]
    stack = stack_of("linear", 7)
    with torch.no_grad():
        stack.query.zero_()[:, :D, :D] = torch.eye(D)
        stack.key.zero_()
        for row, optimum in zip(stack.key, optima, strict=True):
            row[:D, :D] = optimum.preconditioner.T * len(optimum.weights)
        stack.value.zero_()[:, -1] = 1
    risks, errors = measure_risks(stack, stream, 20_000, 3000)
    for cell, optimum, risk, error in zip(stream.cells, optima, risks, errors, strict=True):
        assert risk == pytest.approx(optimum.risk / cell.curve.data.power, abs=4 * error)
        assert 0 < error < 0.03 * risk


def test_ranks_and_frozen_parts_stay():
    curve = Curve("", Gaussian(D))
    stream = TaskStream([Cell(curve, 4, 0), Cell(curve, 4, 1)], generator())
    base = LinearStack(M, D + 1, generator(), [1, 3])
    fit(base, stream, 5, 8, 0.1)
    assert torch.linalg.matrix_rank((base.query @ base.key.mT).detach()).tolist() == [1, 3]
    kept = [p.clone() for p in base.parameters()]
    stack = AdaptedStack(base, D + 1, generator(), [0, 2])
    tokens = stream.draw(8)[0]
    assert torch.equal(stack(tokens), base(tokens))
    fit(stack, stream, 5, 8, 0.1)
    assert all(torch.equal(p, old) for p, old in zip(base.parameters(), kept, strict=True))
    moved = (predict(stack, tokens, stream.counts) - predict(base, tokens, stream.counts)).abs().amax(1)
    assert moved[0] == 0 < moved[1]
