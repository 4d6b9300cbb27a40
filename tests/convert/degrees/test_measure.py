"""Degrees of freedom of a whole model, and features that go into a converted one."""

import pytest
import torch
from tests.convert.tiny import Counted, llama

from linattn.convert.convert import convert, plan_model
from linattn.convert.degrees.kernel import kernel_degrees, log_estimate, scaled
from linattn.convert.degrees.measure import degrees_of_freedom, install_features, start_features
from linattn.convert.degrees.measure import measured as measured_at_first
from linattn.convert.degrees.observe import watch
from linattn.convert.layer.attention import linearized_layers
from linattn.support.options import OptionError


@pytest.fixture(scope="module")
def batches():
    return [Counted()(step)["input_ids"] for step in range(4)]


@pytest.fixture(scope="module")
def measured(batches):
    return degrees_of_freedom(llama(), batches, tolerance=2**-4, points=64, draws=2, center=True)


def test_values_are_those_of_the_pooled_points(measured):
    assert list(measured.layers) == [0, 1]
    layer = measured.layers[1]
    assert layer.mean.shape == layer.std.shape == (2,)
    assert layer.points.shape == (2, 64, 8)
    again = kernel_degrees(layer.points, 2**-4)
    # The mean of two draws, the last of which is kept, and their standard deviation.
    torch.testing.assert_close((again - layer.mean).abs(), layer.std / 2**0.5)
    assert measured.values()[1] == float(layer.mean.max())
    assert [row["layer"] for row in measured.to_dict()["layers"]] == [0, 1]


def test_dimensions_come_of_many_draws_and_features_start_around_the_mean_key(batches):
    """One draw hangs on its few points of large norm. Softmax attention does not see the mean of its keys; random
    features do, and pay for it."""
    asked, keys, model = [], [], llama()

    def batch(step):
        asked.append(step)
        return batches[step % len(batches)]

    degrees = measured_at_first(model, batch, [1])
    assert asked == list(range(16))
    assert (list(degrees.layers), degrees.tolerance) == ([1], 2**-4)
    points = min(512, 16 * batches[0].numel() * 3 // 16)  # two query heads of a key head, and the key
    assert degrees.layers[1].points.shape == (2, points, 8)
    watch(model, batches, lambda seen: keys.append(seen.k) if seen.layer_idx == 1 else None)
    convert(model, plan_model(model, "dof", layers=[1], feature_dim=24))
    start_features(model, degrees, seed=0)
    center = linearized_layers(model)[1].core.features.center
    torch.testing.assert_close(center, torch.cat(keys).mean((0, 2)), rtol=1e-4, atol=1e-5)


def test_an_installed_layer_computes_attention_with_the_estimated_kernel(measured):
    """Whatever the unit and the centre: rows of K^(q, k - centre), divided by their sums."""
    model, features = llama("dof", feature_dim=24, window=0), measured.start({1: 24}, sampling="leverage")
    install_features(model, features, measured)
    core, center = linearized_layers(model)[1].core, measured.layers[1].center
    q, k, v = (torch.randn(1, heads, 9, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    keys = scaled(k.double() - center[:, None])
    logs = log_estimate(scaled(q.double()).unflatten(1, (2, 2)).flatten(2, 3), keys, features[1])
    rows = logs.unflatten(2, (2, 9)).masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf).softmax(-1)
    expected = (rows @ v.double().unsqueeze(2)).flatten(1, 2)
    torch.testing.assert_close(core(q, k, v).double(), expected, rtol=1e-4, atol=1e-5)


def test_starts_are_seeded_and_of_two_kinds(measured):
    first, again, other = (measured.start({0: 16, 1: 32}, seed)[1].z for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (2, 32, 8)
    assert measured.start({0: 16})[0].log_alpha.eq(0).all()
    assert measured.start({0: 16}, sampling="leverage")[0].log_alpha.ne(0).all()


def test_what_does_not_fit_is_refused(measured, batches):
    features = measured.start({0: 16})
    with pytest.raises(ValueError, match=r"layer 0 .* feature_dim=16, it is not converted"):
        install_features(llama(), features, measured)
    with pytest.raises(ValueError, match="layer 0"):
        install_features(llama("dof", feature_dim=32, window=0), features, measured)
    with pytest.raises(OptionError, match="normal, leverage"):
        measured.start({0: 16}, sampling="uniform")
    with pytest.raises(OptionError, match="draws"):
        degrees_of_freedom(llama(), batches, draws=0)
