"""What is seen of a model, the sample that is kept of it, its degrees of freedom, and features of a converted one."""

import pytest
import torch
from tests.convert.causal import build
from tests.convert.tiny import Counted, llama

import linattn
from linattn.convert.convert import convert, linearized_layers, plan_model
from linattn.convert.degrees import measure
from linattn.convert.degrees.kernel import PositiveFeatures, kernel_degrees, log_estimate, scaled
from linattn.convert.degrees.measure import Reservoir, measured, start_features, watch


@pytest.fixture(scope="module")
def ids():
    return Counted()(0)["input_ids"]


def test_plain_and_converted_models_show_the_same(ids):
    seen = [], []
    for rows, model in zip(seen, (llama(), llama("still")), strict=True):
        before = [(module.training, len(module._forward_pre_hooks)) for module in model.modules()]
        watch(model, [ids], rows.append)
        assert [(module.training, len(module._forward_pre_hooks)) for module in model.modules()] == before
    assert len(seen[0]) == 2
    for plain, converted in zip(*seen, strict=True):
        assert plain.layer_idx == converted.layer_idx
        for name in ("q", "k", "v", "x", "output"):
            torch.testing.assert_close(getattr(plain, name), getattr(converted, name))
    with pytest.raises(ValueError, match="no points were added"):
        Reservoir(4).points()


def test_layers_that_keep_their_window_are_not_looked_at():
    model, seen = build("Gemma3"), []
    ids = torch.randint(48, (1, 20), generator=torch.Generator().manual_seed(0))  # longer than the window
    watch(model, [ids], lambda each: seen.append(each.layer_idx))
    assert seen == [1, 2]
    linattn.linearize(model, "dof", batches=lambda step: {"input_ids": ids}, transfer=None, finetune=None)
    assert [layer["layer"] for layer in model.linearize_report.degrees["layers"]] == [1, 2]
    assert sorted(linearized_layers(model)) == [1, 2]


def test_padding_is_told(ids):
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    masks = []
    watch(llama(), [{"input_ids": ids, "attention_mask": mask}], lambda each: masks.append(each.key_mask))
    assert all(torch.equal(each, mask.bool()) for each in masks)


def numbered(batch, heads, length, first):
    """Tokens that tell their number, head 0 first."""
    numbers = first + torch.arange(batch * heads * length).view(batch, heads, length, 1)
    return numbers.float()


def test_a_reservoir_pools_the_queries_of_a_group_with_their_keys_and_leaves_out_padding():
    q, k = numbered(2, 4, 3, 0), numbered(2, 2, 3, 100)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    reservoir = Reservoir(1000)
    reservoir.add(q, k, mask)
    for head in range(2):
        queries = q[:, 2 * head : 2 * head + 2].transpose(1, 2)[mask].flatten()
        keys = k[:, head][mask].flatten()
        assert sorted(reservoir.points()[head].flatten().tolist()) == sorted(torch.cat((queries, keys)).tolist())
        assert sorted(reservoir.keys()[head].flatten().tolist()) == sorted(keys.tolist())
    torch.testing.assert_close(reservoir.key_mean()[0], k[:, 0][mask].mean(0))


def test_a_reservoir_draws_evenly_from_all_batches_and_in_disjoint_parts():
    seen = torch.zeros(60)
    for seed in range(400):
        reservoir = Reservoir(10, seed)
        for first, length in ((0, 4), (8, 1), (10, 25)):  # batches of different sizes
            reservoir.add(numbered(1, 1, length, first), numbered(1, 1, length, first + length))
        drawn = reservoir.draws(2)
        assert drawn.shape == (2, 1, 5, 1)
        assert len(set(drawn.flatten().tolist())) == 10
        seen[drawn.flatten().long()] += 1
    # 10 of 60 are drawn, 400 times: 66.7 each, with a standard deviation of 7.5.
    assert (seen - 400 / 6).abs().max() < 5 * 7.5
    assert abs(seen[:30].sum() / seen.sum() - 0.5) < 0.04


def test_centring_moves_the_keys_alone():
    q, k = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 4) + 5
    reservoir = Reservoir(100)
    reservoir.add(q, k)
    sums = reservoir.points(center=True).sum((1, 2)), q[0].sum((1, 2))
    torch.testing.assert_close(*sums, atol=1e-3, rtol=0)  # centred keys add up to 0


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
