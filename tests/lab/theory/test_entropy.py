"""Entropies against the formulas written out, and the laboratory from its options to its files."""

import math

import pytest
import torch

from linattn.analysis.capture import capture
from linattn.lab.experiment import load_results
from linattn.lab.screen import Screen
from linattn.lab.tasks import load_images
from linattn.lab.theory import entropy
from linattn.lab.theory.entropy import (
    Entropy,
    captured_activations,
    measure_layer,
)
from linattn.lab.theory.theorems import random_activations
from linattn.models.vision import create_vit
from linattn.support.options import OptionError

SMALL = {"batch": 2, "heads": 2, "head_dim": 8, "tokens": 40}
SCALES = (4.0, 1.0, 0.25)
TINY = {"heads": 2, "head_dim": 8, "tokens": 16, "scales": (0.25, 1.0, 4.0), "device": "cpu", "jobs": 1}


def softmax_entropies(q, k):
    p = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return -torch.special.xlogy(p, p).sum(-1)


def test_random_activations_depend_on_the_seed_alone():
    one, same, other = (random_activations(tokens=64, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.q, same.q)
    assert not torch.equal(one.q, other.q)
    norms = one.q.norm(dim=-1)
    assert norms.median() == pytest.approx(32**0.5, rel=0.1)
    assert norms.log().std() == pytest.approx(0.7, rel=0.1)


def test_softmax_rows_are_those_of_the_formula():
    given = random_activations(**SMALL)
    row = measure_layer("softmax", given, SCALES)
    assert row["scales"] == [0.25, 1.0, 4.0]
    expected = [softmax_entropies(c * given.q, given.k) for c in row["scales"]]
    assert row["pse"] == pytest.approx([float(e.mean()) for e in expected])
    assert row["entropy"] == pytest.approx(row["pse"])
    norms = given.q.norm(dim=-1)
    assert row["norms"] == pytest.approx([float(c * norms.median()) for c in row["scales"]])
    heads = zip(expected[1].unbind(1), norms.unbind(1), strict=True)
    pairs = [torch.stack([e.flatten(), n.flatten()]).corrcoef()[0, 1] for e, n in heads]
    assert row["correlation"] == pytest.approx(float(sum(pairs)) / 2)
    assert row["kind"] == "sharper"


def test_a_mechanism_that_does_not_fit_says_why():
    row = measure_layer("mirror", random_activations(batch=1, heads=1, tokens=8, head_dim=7), SCALES)
    assert "even" in row["reason"]
    assert "pse" not in row


def test_captured_activations_are_what_the_layers_made_of_their_input():
    torch.manual_seed(0)
    model = create_vit("digits", "softmax", depth=2).double().eval()
    images = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    layers = captured_activations(model, images, "a model")
    assert [layer.layer for layer in layers] == ["blocks.0.attn", "blocks.1.attn"]
    for layer, call, block in zip(layers, capture(model, images), model.blocks, strict=True):
        assert torch.equal(layer.q, call.q)
        q, k, _ = block.attn.qkv(layer.arguments["x"]).chunk(3, dim=-1)
        torch.testing.assert_close(layer.q, q.unflatten(-1, (3, 16)).transpose(1, 2))
        torch.testing.assert_close(layer.k, k.unflatten(-1, (3, 16)).transpose(1, 2))
    own = measure_layer("softmax", layers[0], SCALES, trained=True)
    assert own["pse"] == measure_layer("softmax", layers[0], SCALES)["pse"]
    assert own["pse"][0] == pytest.approx(math.log(layers[0].k.shape[2]), abs=0.1)


def run(**options):
    lab = Entropy(**TINY, **options)
    assert lab.run(Screen(quiet=True)) == 0
    return load_results(lab.folder / "results.json")["rows"]


def test_a_host_is_trained_and_all_files_are_written(tmp_path, monkeypatch):
    few = load_images("digits").subset(train=320, test=40)
    monkeypatch.setattr(entropy, "load_images", lambda source: few)
    names = ("softmax", "relu", "pola", "gated", "efficient")
    rows = run(output=tmp_path, mechanisms=names, hosts=("pola",), epochs=1, images=4)
    assert sum(row["about"] == "checks" and row["passed"] for row in rows) == 14
    assert [row["mechanism"] for row in rows if row["about"] == "random"] == list(names)
    real = [row for row in rows if row["about"] == "host" and not row["trained"]]
    own = [row for row in rows if row["about"] == "host" and row["trained"]]
    assert len(real) == 5 * 3
    assert [row["mechanism"] for row in own] == ["pola"] * 3
    # On the same activations, once as it starts and once as it was trained: its powers have moved.
    assert {row["kind"] for row in real if row["mechanism"] in ("relu", "pola", "gated")} == {"blind"}
    started = [row for row in real if row["mechanism"] == "pola"]
    assert all(abs(a["pse"][1] - b["pse"][1]) > 1e-6 for a, b in zip(started, own, strict=True))
    charts = sorted(path.stem for path in tmp_path.glob("*.png"))
    assert charts == [f"entropy-{name}" for name in ("random", "real", "trained")]
    page = (tmp_path / "report.html").read_text()
    assert all(words in page for words in ("14 of 14 checks hold", "Theorems, checked"))


def test_what_is_given_wins_over_quick():
    found = [Entropy(quick=True), Entropy(quick=True, hosts=("relu", "nala"), epochs=3), Entropy()]
    chosen = [(lab.hosts, lab.epochs, lab.tokens) for lab in found]
    assert chosen == [(("softmax",), 1, 32), (("relu", "nala"), 3, 32), (entropy.HOSTS, 10, 64)]
    assert Entropy.parse({"hosts": ""}).hosts == ()


def test_wrong_options():
    for name, value in (("scales", "2,4"), ("hosts", "softmaxx"), ("mechanisms", "nothing"), ("tokens", "4"),
                        ("head_dim", "7")):  # fmt: skip
        with pytest.raises(OptionError) as raised:
            Entropy.parse({name: value})
        assert raised.value.option == name
