"""Weights: how they start, and that a folder gives them back, none of them made up in silence."""

import pytest
import torch

from linattn import list_mechanisms
from models.language.small import TOLERANCE, build, draw

pytest.importorskip("transformers", reason="the extra hf is not installed")

MIXED = {"mechanism": ["hedgehog", "gated", "performer"], "num_hidden_layers": 3, "canon": "ABCD",
         "attention_gate": "silu", "attention_norm": "head_rms",
         "mechanism_options": [{}, {"gate": "channel"}, {"num_features": 12}], "rotary": [1.0, 0.5, 0]}  # fmt: skip


ENCODER = {"causal": False, "mechanism": "relu", "num_labels": 5}
HEADS = [(head, ENCODER) for head in ("Model", "ForMaskedLM", "ForSequenceClassification")]
HEADS += [("ForCausalLM", MIXED), ("ForCausalLM", MIXED | {"tie_word_embeddings": True})]


@pytest.mark.parametrize(("head", "changes"), HEADS, ids=str)
def test_round_trip(tmp_path, head, changes):
    import transformers

    model = build(head, **changes)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    auto = getattr(transformers, "AutoModel" if head == "Model" else f"AutoModel{head}")
    loaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(loaded) is type(model)
    for layer in range(model.config.num_hidden_layers):
        assert loaded.config.block_options(layer) == model.config.block_options(layer)
    model.init_weights()  # changes nothing any more
    torch.testing.assert_close(loaded.eval()(draw())[0], model(draw())[0], **TOLERANCE)
    if head == "ForCausalLM":
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == ("tie_word_embeddings" in changes)


@pytest.mark.parametrize(
    ("mechanism", "own"),
    [
        *((name, {}) for name in list_mechanisms(causal=True)),
        ("lion", {"decay": "none"}),
        ("lion", {"decay": "fixed", "decay_per": "channel"}),
        ("lion", {"decay": "selective", "decay_per": "channel"}),
        ("mlstm", {"input_gate": "sigmoid"}),
        ("zeros", {"zero_order": "tanh"}),
        ("zeros_softmax", {"gate": "sigmoid"}),
    ],
    ids=str,
)
def test_round_trip_of_every_mechanism(tmp_path, mechanism, own):
    """Transformers makes a model without memory before it fills it: what a mechanism computes for its start fits that.

    Nothing that is loaded is what a new mechanism starts from, buffers included.
    """
    model = build(mechanism=mechanism, mechanism_options=own)
    with torch.no_grad():
        for x in [*model.parameters(), *model.buffers()]:
            x.add_(0.1)
    model.save_pretrained(tmp_path)
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    others = dict([*loaded.named_parameters(), *loaded.named_buffers()])
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(others.pop(name), x), name
    assert not others
    torch.testing.assert_close(loaded.eval()(draw()).logits, model(draw()).logits, **TOLERANCE)


def test_missing_weights_are_reported_and_start_as_their_papers_say(tmp_path):
    from safetensors.torch import load_file, save_file

    from linattn.models.language import LinearAttentionForCausalLM

    model = build(**MIXED)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers."
    gone = {name for name in weights if "canon_a" in name or f"{prefix}2.attn.mechanism" in name}
    gone |= {f"{prefix}0.attn.mechanism.query_map.weight", f"{prefix}1.mlp.fc1.weight"}
    save_file({n: x for n, x in weights.items() if n not in gone}, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, report = LinearAttentionForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == gone
    kept = {name: x for name, x in loaded.state_dict().items() if name not in gone}
    assert all(torch.equal(x, weights[name]) for name, x in kept.items())
    hedgehog, performer = loaded.model.layers[0].attn.mechanism, loaded.model.layers[2].attn.mechanism
    assert torch.equal(hedgehog.query_map.weight, torch.eye(8).double().expand(4, 8, 8))
    norms = performer.directions.norm(dim=-1)
    assert 0 < norms.min() < norms.max() < 8  # directions of 8 channels, of length about sqrt(8)
    assert 0.4 < loaded.model.layers[0].canon_a.weight.abs().max() <= 0.5


def test_the_start_of_weights():
    """Linear maps at ``initializer_range``; Canon and mechanisms are not touched by it."""
    model = build(**MIXED, hidden_size=64, intermediate_size=128, initializer_range=0.01)
    for block in model.model.layers:
        assert 0.45 < block.canon_a.weight.abs().max() <= 0.5
        for linear in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2):
            assert linear.weight.std().item() == pytest.approx(0.01, rel=0.1)
        assert torch.equal(block.norm1.weight, torch.ones(64).double())
    assert torch.equal(model.model.layers[0].attn.mechanism.key_map.weight, torch.eye(16).double().expand(2, 16, 16))
    gate = model.model.layers[1].attn.mechanism.gate_map[0].weight  # PyTorch's own start: U(-1/8, 1/8) for 64 inputs
    assert gate.abs().max().item() == pytest.approx(1 / 8, rel=0.02)
