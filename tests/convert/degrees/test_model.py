"""Degrees of freedom of a whole model, and features that go into a converted one."""

import pytest
import torch
from tests.convert.causal import build
from tests.convert.tiny import Counted, held_out, llama

import linattn
from linattn.convert.convert import convert, plan_model
from linattn.convert.degrees import (
    LearnOptions,
    allocate,
    degrees_of_freedom,
    install_features,
    kernel_degrees,
    learn_layers,
    start,
)
from linattn.convert.degrees.kernel import log_estimate, scaled
from linattn.convert.degrees.observe import watch
from linattn.convert.layer.attention import linearized_layers
from linattn.convert.transfer import transfer_errors
from linattn.support.options import OptionError


@pytest.fixture(scope="module")
def batches():
    return [Counted()(step)["input_ids"] for step in range(4)]


@pytest.fixture(scope="module")
def measured(batches):
    return degrees_of_freedom(llama(), batches, tolerance=2**-4, points=64, draws=2, center=True)


def test_plain_and_converted_models_show_the_same_queries_and_keys(batches):
    seen = [], []
    for found, model in zip(seen, (llama(), llama("still")), strict=True):
        mode = model.training
        assert watch(model, batches[:1], found.append) == 1
        assert model.training == mode
    for plain, converted in zip(*seen, strict=True):
        assert plain.layer_idx == converted.layer_idx
        torch.testing.assert_close(plain.q, converted.q)
        torch.testing.assert_close(plain.k, converted.k)
    layers = [module for module in llama().modules() if module._forward_pre_hooks]
    assert not layers  # hooks are gone


def test_layers_that_keep_their_window_are_not_looked_at():
    model, seen = build("Gemma3"), []
    ids = torch.randint(48, (1, 20), generator=torch.Generator().manual_seed(0))  # longer than the window
    watch(model, [ids], lambda pairs: seen.append(pairs.layer_idx))
    assert seen == [1, 2]
    linattn.linearize(model, "dof", batches=lambda step: {"input_ids": ids}, transfer=None, finetune=None)
    assert [layer["layer"] for layer in model.linearize_report.degrees["layers"]] == [1, 2]
    assert sorted(linearized_layers(model)) == [1, 2]


def test_padding_is_no_point(batches):
    mask = torch.ones_like(batches[0])
    mask[0, :40] = 0
    masks = []
    watch(llama(), [{"input_ids": batches[0], "attention_mask": mask}], lambda pairs: masks.append(pairs.key_mask))
    assert all(torch.equal(found, mask.bool()) for found in masks)


def test_dimensions_come_of_many_draws(batches):
    """One draw hangs on its few points of large norm: of a few, every sample would give other dimensions."""
    asked = []

    def batch(step):
        asked.append(step)
        return batches[step % len(batches)]

    found = start.measured(llama(), batch, [1])
    assert asked == list(range(16))
    assert list(found.layers) == [1]
    assert found.tolerance == 2**-4
    tokens = 16 * batches[0].numel()
    points = min(512, tokens * 3 // 16)  # two query heads of a key head, and the key
    assert found.layers[1].points.shape == (2, points, 8)


def test_features_start_around_the_mean_key(batches):
    """Softmax attention does not see the mean of its keys; random features do, and pay for it."""
    model, seen = llama(), []
    found = start.measured(model, lambda step: batches[step % len(batches)], [1])
    watch(model, batches, lambda pairs: seen.append(pairs.k) if pairs.layer_idx == 1 else None)
    mean = torch.cat(seen).mean((0, 2))
    convert(model, plan_model(model, "dof", layers=[1], feature_dim=24))
    start.start_features(model, found, seed=0)
    torch.testing.assert_close(linearized_layers(model)[1].core.features.center, mean, rtol=1e-4, atol=1e-5)


def test_values_are_those_of_the_pooled_points(batches, measured):
    assert list(measured.layers) == [0, 1]
    layer = measured.layers[1]
    assert layer.mean.shape == layer.std.shape == (2,)
    assert layer.points.shape == (2, 64, 8)
    again = kernel_degrees(layer.points, 2**-4)
    # The mean of two draws, the last of which is kept, and their standard deviation.
    torch.testing.assert_close((again - layer.mean).abs(), layer.std / 2**0.5)
    assert measured.values("max")[1] >= measured.values("p90")[1] >= measured.values("mean")[1]
    assert [row["layer"] for row in measured.to_dict()["layers"]] == [0, 1]


@pytest.mark.parametrize("sampling", ["normal", "leverage"])
def test_learned_features_go_into_the_converted_model_and_make_it_better(batches, measured, sampling):
    dims = allocate(measured.values(), 32)
    model = llama()
    start = measured.start(dims, sampling=sampling)
    learned = learn_layers(model, batches * 15, start, measured, LearnOptions(steps=60, rows=24))
    assert all(len(learner.curve) == 60 for learner in learned.values())
    convert(model, plan_model(model, "dof", feature_dim=dims))
    errors = []
    for features in (start, {index: learner.features() for index, learner in learned.items()}):
        install_features(model, features, measured)
        errors.append(transfer_errors(model, held_out()))
    assert all(errors[1][layer] < errors[0][layer] for layer in dims), errors
    for learner in learned.values():
        assert sum(learner.curve[-5:]) < 0.7 * sum(learner.curve[:5])


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
    with pytest.raises(OptionError, match="normal, leverage"):
        measured.start({0: 16}, sampling="uniform")


def test_features_that_do_not_fit_are_refused(measured):
    features = measured.start({0: 16})
    with pytest.raises(ValueError, match=r"layer 0 .* feature_dim=16, it is not converted"):
        install_features(llama(), features, measured)
    with pytest.raises(ValueError, match="layer 0"):
        install_features(llama("dof", feature_dim=32, window=0), features, measured)
