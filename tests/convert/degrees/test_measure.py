"""Degrees of freedom of a whole model, and features that go into a converted one."""

import pytest
import torch
from tests.convert.tiny import Counted, llama

from linattn.convert.convert import convert, linearized_layers, plan_model
from linattn.convert.degrees import measure
from linattn.convert.degrees.kernel import PositiveFeatures, kernel_degrees, log_estimate, scaled
from linattn.convert.degrees.measure import Reservoir, measured, start_features, watch


@pytest.fixture(scope="module")
def degrees():
    return measured(llama(), Counted(), [0, 1])


def test_values_are_those_of_draws_of_centred_points(degrees, monkeypatch):
    """One draw hangs on its few points of large norm: there are sixteen, of the points of the first batches."""
    asked, seen, batches = [], Reservoir(10**6), Counted()
    monkeypatch.setattr(measure, "POINTS", 64)
    layer = measured(llama(), lambda step: asked.append(step) or batches(step), [1])[1]
    assert asked == list(range(16))
    assert layer.mean.shape == layer.std.shape == (2,)
    watch(llama(), map(batches, range(16)), lambda each: seen.add(each.q, each.k) if each.layer_idx == 1 else None)
    torch.testing.assert_close(layer.center, seen.key_mean())
    some = Reservoir(64 * 16)
    watch(llama(), map(batches, range(16)), lambda each: some.add(each.q, each.k) if each.layer_idx == 1 else None)
    values = torch.stack([kernel_degrees(draw, 2**-4) for draw in some.draws(16, center=True)])
    torch.testing.assert_close((layer.mean, layer.std), (values.mean(0), values.std(0)))


def test_features_start_normal_and_compute_attention_with_the_estimated_kernel(degrees):
    """Whatever the unit and the centre: rows of K^(q, k - centre), divided by their sums. Softmax does not see
    the mean of its keys; random features do, and pay for it."""
    models = [llama() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        convert(model, plan_model(model, "dof", feature_dim=24, layers=[1]))
        start_features(model, degrees, seed)
    core, again, other = (linearized_layers(model)[1].core for model in models)
    assert torch.equal(core.features.z, again.features.z)
    assert not torch.equal(core.features.z, other.features.z)
    assert core.features.log_alpha.eq(0).all()
    assert core.features.log_unit.ne(0).all()
    center = degrees[1].center
    assert torch.equal(core.features.center, center)
    q, k, v = (torch.randn(1, heads, 9, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    features = PositiveFeatures(core.features.z.detach(), core.features.log_alpha.detach())
    keys = scaled(k.double() - center[:, None])
    logs = log_estimate(scaled(q.double()).unflatten(1, (2, 2)).flatten(2, 3), keys, features)
    rows = logs.unflatten(2, (2, 9)).masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf).softmax(-1)
    expected = (rows @ v.double().unsqueeze(2)).flatten(1, 2)
    torch.testing.assert_close(core(q, k, v).double(), expected, rtol=1e-4, atol=1e-5)
