"""Numbers of one mechanism on given queries and keys, against the formulas written out."""

import math

import pytest
import torch

from linattn.analysis.capture import capture
from linattn.lab.theory.entropy.activations import Activations, captured_activations, random_activations
from linattn.lab.theory.entropy.experiment import measure_layer
from linattn.models.vision import create_vit

SMALL = {"batch": 2, "heads": 2, "head_dim": 8, "tokens": 40}
SCALES = (4.0, 1.0, 0.25)


def softmax_entropies(q, k, causal=False):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    p = scores.softmax(-1)
    return -torch.special.xlogy(p, p).sum(-1)


def test_random_activations_depend_on_the_seed_alone():
    one, same, other = (random_activations(tokens=64, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.q, same.q)
    assert not torch.equal(one.q, other.q)
    norms = one.q.norm(dim=-1)
    assert norms.median() == pytest.approx(32**0.5, rel=0.1)
    assert norms.log().std() == pytest.approx(0.7, rel=0.1)


@pytest.mark.parametrize("causal", [False, True])
def test_softmax_rows_are_those_of_the_formula(causal):
    given = random_activations(**SMALL)
    given = Activations("random", "", given.q, given.k, given.x, causal=causal)
    row = measure_layer("softmax", given, SCALES)
    counted = slice(30, None) if causal else slice(None)  # causal: the last quarter of the queries
    assert row["scales"] == [0.25, 1.0, 4.0]
    expected = [softmax_entropies(c * given.q, given.k, causal)[:, :, counted] for c in row["scales"]]
    assert row["pse"] == pytest.approx([float(e.mean()) for e in expected])
    assert row["entropy"] == pytest.approx(row["pse"])
    norms = given.q.norm(dim=-1)[:, :, counted]
    assert row["norms"] == pytest.approx([float(c * norms.median()) for c in row["scales"]])
    pairs = [
        torch.stack([e.flatten(), n.flatten()])
        for e, n in zip(*(t.unbind(1) for t in (expected[1], norms)), strict=True)
    ]
    assert row["correlation"] == pytest.approx(sum(float(p.corrcoef()[0, 1]) for p in pairs) / 2)
    assert sorted(row["binned_norms"]) == row["binned_norms"]
    assert sum(row["binned_pse"]) / 8 == pytest.approx(row["pse"][1], rel=0.05)
    assert row["kind"] == "sharper"


def test_kinds_and_reasons():
    given = random_activations(**SMALL)
    assert measure_layer("relu", given, SCALES)["kind"] == "blind"
    assert measure_layer("gated", given, SCALES)["kind"] == "blind"  # takes its gates from x
    causal = Activations("random", "", given.q, given.k, causal=True)
    row = measure_layer("agent", causal, SCALES)
    assert "only bidirectional" in row["reason"]
    assert "pse" not in row


def test_captured_activations_are_what_the_layers_made_of_their_input():
    torch.manual_seed(0)
    model = create_vit("digits", "softmax", depth=2).double().eval()
    images = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    layers = captured_activations(model, images, "a model")
    assert [layer.layer for layer in layers] == ["blocks.0.attn", "blocks.1.attn"]
    for layer, call, block in zip(layers, capture(model, images), model.blocks, strict=True):
        assert torch.equal(layer.q, call.q)
        q, k, _ = block.attn.qkv(layer.x).chunk(3, dim=-1)
        torch.testing.assert_close(layer.q, q.unflatten(-1, (3, 16)).transpose(1, 2))
        torch.testing.assert_close(layer.k, k.unflatten(-1, (3, 16)).transpose(1, 2))
    assert not model.blocks[0].attn._forward_pre_hooks
    own = measure_layer("softmax", layers[0], SCALES, trained=True)
    assert own["pse"] == measure_layer("softmax", layers[0], SCALES)["pse"]
    assert own["pse"][0] == pytest.approx(math.log(layers[0].k.shape[2]), abs=0.1)
    assert own["trained"]
