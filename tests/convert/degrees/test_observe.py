"""What is seen of a model, and the sample that is kept of it."""

import pytest
import torch
from tests.convert.causal import build
from tests.convert.tiny import Counted, llama

import linattn
from linattn.convert.convert import linearized_layers
from linattn.convert.degrees.measure import Reservoir, watch


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
