"""How far two states of a training are apart, and what counts as the same step."""

import pytest
import torch
from torch import nn

from linattn.lab.train.step_check import Snapshot, difference, disagreement, training_state


def test_differences_are_shares_of_what_a_step_changes():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sums = torch.zeros(3, dtype=torch.float64)

    def state():
        return training_state(model, optimizer, (), sums)

    before = Snapshot(state())
    model(torch.tensor([[1.0, 2.0]])).sum().backward()
    optimizer.step()
    sums.add_(torch.tensor([3.0, 4.0, 0.0]))
    first = Snapshot(state())
    assert set(difference(before, first, state()).values()) == {0.0}
    sums[0] += 0.5
    optimizer.state[model.bias]["exp_avg"].mul_(1.01)
    found = difference(before, first, state())
    assert found["sums"] == pytest.approx(0.1)
    assert found["moments, exp_avg"] == pytest.approx(0.01, rel=0.1), "of its own size, not of all of them"
    assert found["weights"] == 0
    assert "sums differ by 1.0e-01" in disagreement(found, {}, "bf16")
    assert disagreement(found, {"sums": 0.1}, "bf16") is None, "no farther apart than the step is from itself"
    assert "moments" in disagreement(found | {"sums": 0.0}, {}, "fp32")
    assert "nan" in disagreement({"sums": float("nan")}, {}, "bf16")
    before.restore(state())
    assert sums.tolist() == [0, 0, 0]
    assert model.weight.grad is None
    assert optimizer.state[model.bias]["exp_avg"].item() == 0, "it was not there before"
    assert torch.equal(model.weight, before.values["weights.weight"])
