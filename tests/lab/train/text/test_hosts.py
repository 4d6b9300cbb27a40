"""Hosts, patterns of layers, recipes."""

from dataclasses import replace

import pytest
import torch
from tests.lab.train.text.small_text import HOST, TASK

from linattn.lab.tasks.text import text_task
from linattn.lab.train.text.hosts import Host, count_parameters, create_host, take_weights, with_parameters
from linattn.support.options import OptionError


def test_what_mechanisms_do_not_own_starts_the_same_beside_each():
    """zeros and gated draw numbers for themselves, which must not shift those of the host."""
    common = {"canon": "ABCD", "attention_norm": "head_rms", "attention_gate": "silu"}
    hosts = [replace(HOST, mechanism=name, **common) for name in ("elu", "zeros", "gated")]
    plain, *others = (dict(create_host(host, TASK, 3).named_parameters()) for host in hosts)
    for other in others:
        assert {name for name in other if ".mechanism." not in name} == set(plain)
        assert all(torch.equal(value, other[name]) for name, value in plain.items())
    again = dict(create_host(hosts[0], TASK, 4).named_parameters())
    assert not torch.equal(again["lm_head.weight"], plain["lm_head.weight"])
    assert plain["model.layers.0.canon_a.weight"].abs().max() > 0.3, "Canon starts large"
    assert abs(plain["model.layers.0.attn.gate.proj.weight"].std() - 0.02) < 0.005
    assert create_host(HOST, TASK, 3).model.layers[0].attn.gate is None, "only where it is asked for"


def test_encoders_of_the_arena_learn_a_position_for_each_token_of_the_task():
    task = text_task("listops", length=60, shortest=10, train_examples=8, test_examples=8)
    model = create_host(Host(size="lra", mechanism="elu"), task, 0)
    assert (model.config.max_position_embeddings, model.config.rotary) == (60, 0.0)
    assert abs(model.model.embed_positions.weight.std() - 0.02) < 0.002
    assert create_host(HOST, TASK, 0).config.max_position_embeddings is None


def test_a_model_of_several_documents_knows_what_ends_one(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} text. " * 40)
    several = text_task("text", data=str(tmp_path), length=8)
    one = text_task("text", data=str(tmp_path / "a.txt"), length=8)
    found = [create_host(Host(size="pico"), task, 0) for task in (several, one)]
    assert [model.config.eos_token_id for model in found] == [256, None]
    assert found[0].generation_config.eos_token_id == 256, "generate stops there"


def test_layers_are_those_of_the_pattern():
    host = Host(size="pico", hybrid="gated*2,softmax", depth=4, option={"gated.gate": "head"})
    assert replace(host, width=16).shape["intermediate_size"] == 16, "as narrow as the model"
    model = create_host(host, TASK, 0)
    assert model.config.mechanism == ["gated", "gated", "softmax", "gated"]
    assert [layer.attn.mechanism.gate for layer in model.model.layers if layer.attn.mechanism.info.name == "gated"] == [
        "head"
    ] * 3
    assert model.config.attention_norm == "head_rms"


@pytest.mark.parametrize(
    ("mechanism", "options", "norm"),
    [
        ("softmax", {}, None),
        ("gated", {}, "head_rms"),
        ("zeros", {}, None),
        ("zeros", {"zero_order": "tanh"}, None),
        ("zeros", {"head_norm": False}, "head_rms"),
        ("zeros,softmax", {}, None),
        ("zeros,softmax", {"zeros.head_norm": False}, "head_rms"),
        ("zeros,gated", {}, "head_rms"),
    ],
)
def test_a_norm_stands_behind_mechanisms_that_have_none(mechanism, options, norm):
    host = Host(size="pico", mechanism=mechanism, option=options)
    assert create_host(host, TASK, 0).config.attention_norm == norm
    assert replace(host, attention_norm="layer").norm == "layer"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hybrid": "gated*,softmax"}, "hybrid: must look like"),
        ({"hybrid": "gated*5", "depth": 4}, "names 5 layers, but the model has 4"),
        ({"mechanism": "gated/elu", "depth": 2, "option": {"gate": "head"}}, "say whose it is"),
        ({"option": {"gated.gate": "head"}}, "gated is not compared"),
        ({"option": {"gate": "head"}}, "option: .* no option 'gate'"),
        ({"canon": "AX"}, "canon: canon must be made of"),
        ({"attention_gate": "relu"}, "attention_gate: must be one of none, lin"),
        ({"attention_norm": "l1"}, "attention_norm: must be one of auto, none"),
        ({"heads": 3}, "heads: num_attention_heads must divide hidden_size"),
        ({"mechanism": "agent"}, "mechanism: mechanism 'agent' is only"),
        ({"mechanism": "nobody"}, "nobody"),
        ({"head_dim": 5}, "width: must be a multiple of 5, .* got 16"),
        ({"head_dim": 8, "heads": 2}, "head_dim: and heads = 2 both fix"),
        ({"width": 0}, "width: must be at least 1"),
        ({"rotary": 1.5}, "rotary: must be at least 0 and at most 1"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named(changes, words):
    with pytest.raises(OptionError, match=words):
        create_host(replace(HOST, **changes), TASK, 0)


def test_parameters_are_made_equal():
    wanted = count_parameters(create_host(replace(HOST, mechanism="softmax", mlp_width=64), TASK, 0))
    host = replace(HOST, mechanism="zeros", mlp_width=64)
    before = count_parameters(create_host(host, TASK, 0))
    found = with_parameters(host, TASK, wanted, multiple=4)
    after = count_parameters(create_host(found, TASK, 0))
    assert before - wanted > 3 * 16 * 4, "zeros has a map of its own"
    assert abs(after - wanted) <= 3 * 16 * 4 / 2


def test_weights_of_another_run_are_taken_whole_or_not_at_all(tmp_path):
    first = create_host(HOST, TASK, 1)
    first.save_pretrained(tmp_path)
    model = create_host(HOST, TASK, 2)
    take_weights(model, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), first.parameters(), strict=True))
    with pytest.raises(OptionError, match=r"start: .* holds another model"):
        take_weights(create_host(replace(HOST, depth=2), TASK, 0), tmp_path)
    with pytest.raises(OptionError, match="start: must be the folder"):
        take_weights(model, tmp_path / "nowhere")
