"""Theorems hold on random numbers, and their checks notice where one does not."""

import pytest
import torch

from linattn.lab.theory import theorems
from linattn.lab.theory.theorems import check_all, random_activations

SMALL = {"batch": 1, "heads": 2, "head_dim": 16, "tokens": 24}


def failed(checks):
    return [row["name"] for row in checks if not row["passed"]]


def test_all_theorems_hold_with_their_numbers():
    found = {row["name"]: row for row in check_all(random_activations(**SMALL), 1)}
    assert failed(found.values()) == []
    assert len(found) == 14
    assert found["power"]["numbers"]["pse_p=6"] < 0.7 * found["power"]["numbers"]["pse_p=1"]
    assert 0 < max(found["blind"]["numbers"].values()) < 1e-9
    assert found["nala"]["numbers"]["change_past_4"] < 1e-2
    assert found["polarity"]["numbers"]["share_opposite"] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("maps", "wrong", "noticed"),
    [
        ("HOMOGENEOUS", torch.nn.functional.softplus, {"homogeneous"}),
        ("RISING", torch.sqrt, {"convex_from_zero", "elasticity"}),  # concave: neither is true of it
        ("FALLING", torch.expm1, {"elasticity"}),
    ],
)
def test_a_map_without_the_property_is_noticed(monkeypatch, maps, wrong, noticed):
    monkeypatch.setitem(getattr(theorems, maps), "wrong", wrong)
    assert set(failed(check_all(random_activations(**SMALL), count=30, length=16))) == noticed


def test_a_mechanism_that_sees_norms_is_not_blind(monkeypatch):
    monkeypatch.setattr(theorems, "BLIND", ("relu", "elu"))
    passed, changes = theorems.blind(random_activations(**SMALL))
    assert not passed
    assert changes["relu"] < 1e-9 < 1e-3 < changes["elu"]
