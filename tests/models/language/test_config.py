"""One config: a mechanism for all layers or one for each, and errors that name what is wrong."""

import pytest

from linattn.support import extras
from models.language.small import build, options

pytest.importorskip("transformers", reason="the extra hf is not installed")


def config(**changes):
    from linattn.models.language import LinearAttentionConfig

    return LinearAttentionConfig(**options(**changes))


def test_a_mechanism_for_each_layer():
    model = build(
        num_hidden_layers=3, mechanism=["elu", "softmax", "gated"], rotary=[0, 1.0, 0.25],
        mechanism_options=[{}, {"scale": 0.5}, {"gate": "head"}],
    )  # fmt: skip
    blocks = model.model.layers
    assert [block.attn.mechanism.info.name for block in blocks] == ["elu", "softmax", "gated"]
    assert [block.attn.rotary_width for block in blocks] == [0, 8, 2]
    assert (blocks[1].attn.mechanism.scale, blocks[2].attn.mechanism.gate) == (0.5, "head")


@pytest.mark.parametrize(("mlp", "width"), [("swiglu", 176), ("gelu", 256)])
def test_widths_that_follow_from_others(mlp, width):
    own = config(hidden_size=64, mlp=mlp, intermediate_size=None, num_key_value_heads=None)
    assert (own.intermediate_size, own.num_key_value_heads) == (width, 4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mechanisms": "elu"}, TypeError, "no option 'mechanisms'"),
        ({"mechanism": "linear"}, ValueError, "mechanism must be one of"),
        ({"mechanism": ["elu", "elu", "elu"]}, ValueError, "mechanism must be one for all layers or a list"),
        ({"mechanism": ["elu", "agent"]}, ValueError, "'agent' is only bidirectional"),
        ({"mechanism_options": {"causal": False}}, TypeError, "must not hold 'causal'"),
        ({"canon": "ABCE"}, ValueError, "got 'E' in 'ABCE'"),
        ({"rotary": [1.0]}, ValueError, "rotary must be one for all layers"),
        ({"pooling": "max"}, ValueError, "pooling must be one of None, 'last', 'mean'"),
        ({"num_key_value_heads": 3}, ValueError, "num_key_value_heads must divide num_attention_heads = 4, got 3"),
        ({"num_attention_heads": 3}, ValueError, "num_attention_heads must divide hidden_size, got hidden_size = 32"),
        ({"hidden_size": 0}, ValueError, "hidden_size must be an integer >= 1, got 0"),
        ({"num_hidden_layers": 0}, ValueError, "num_hidden_layers must be an integer >= 1, got 0"),
        ({"rotary_base": float("inf")}, ValueError, "rotary_base must be a finite number > 1, got inf"),
        ({"initializer_range": 0}, ValueError, "initializer_range must be a finite number > 0, got 0"),
        ({"canon_kernel": 0}, ValueError, "canon_kernel must be an integer >= 1"),
        ({"rotary": 1.5}, ValueError, "rotary must be a finite number >= 0 and <= 1, got 1.5"),
        ({"rotary": 0.05}, ValueError, "rotary=0.05 turns pairs"),
        ({"mlp": "relu"}, ValueError, "mlp must be one of"),
        ({"attention_norm": "batch"}, ValueError, "attention_norm must be one of"),
        ({"attention_gate": "tanh"}, ValueError, "attention_gate must be one of"),
        ({"dropout": -1}, ValueError, "dropout must be a finite number"),
        ({"mechanism_options": {"gate": "head"}}, TypeError, "no option 'gate'; it takes none of its own$"),
        ({"max_position_embeddings": 0}, ValueError, "max_position_embeddings must be an integer >= 1, got 0"),
        ({"norm": "rmsnorm"}, ValueError, "norm must be one of 'layer', 'rms'"),
        ({"causal": "no"}, TypeError, "causal must be True or False, got 'no'"),
        ({"qkv_bias": 1}, TypeError, "qkv_bias must be True or False, got 1"),
        ({"tie_word_embeddings": "no"}, TypeError, "tie_word_embeddings must be True or False, got 'no'"),
        ({"mechanism_options": [{}, None]}, TypeError, "mechanism_options must be a dict of options, got None"),
        ({"mechanism_options": "decay"}, TypeError, "mechanism_options must be a dict of options, got 'decay'"),
        ({"pad_token_id": 40}, ValueError, "pad_token_id must be None or below vocab_size = 40, got 40"),
    ],
)
def test_bad_options_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        config(**changes)


@pytest.mark.parametrize("head_dim", [3, 5, 7, 9])
def test_rotary_positions_of_all_channels_need_an_even_number_of_them(head_dim):
    """However a half of it is rounded. A share of them is rounded to pairs."""
    with pytest.raises(ValueError, match=f"head_dim of {head_dim} gives it {head_dim}: use an even head_dim"):
        config(hidden_size=4 * head_dim)
    assert config(hidden_size=4 * head_dim, rotary=0.7).block_options(0).rotary_width in (2, 4, 6)


def test_a_missing_extra_is_named(monkeypatch):
    from linattn.models import language

    monkeypatch.setitem(extras.EXTRAS, "transformers", "hf")
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "transformers" else object())
    with pytest.raises(extras.MissingExtraError, match=r"transformers: pip install 'linattn\[hf\]'"):
        language.LinearAttentionConfig  # noqa: B018
    assert "LinearAttentionForCausalLM" in dir(language)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        language.Nothing  # noqa: B018
