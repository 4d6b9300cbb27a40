"""Every family: where its attention is, that its teacher is the model, and what a converted one gives."""

import pytest
import torch
from tests.convert import families
from tests.convert.causal import CLOSE, padded
from tests.convert.families import build, converted
from torch.testing import assert_close

from linattn.convert.adapters import families as table
from linattn.convert.adapters import find_adapter, register_adapter
from linattn.convert.adapters.families import FAMILIES, SEPARATE, Family
from linattn.convert.plan import LayerShape

IDS = padded(8, 8)[0] % 36 + 3  # below 3 are special tokens, which RoBERTa counts no position for
MASK = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
IMAGES = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
WIDE = {"intermediate_size": 48}
DECODERS = ("GPT2LMHeadModel", "GPTNeoXForCausalLM")
BERTS = ("BertModel", "RobertaModel", "XLMRobertaModel", "CamembertModel", "ElectraModel")
CONFIGS = {
    "GPT2LMHeadModel": {"n_positions": 32, "scale_attn_by_inverse_layer_idx": True},
    "GPTNeoXForCausalLM": WIDE,
    **dict.fromkeys(BERTS, WIDE),
    "ViTForImageClassification": {**WIDE, "image_size": 16, "patch_size": 4, "num_labels": 7},
    "timm": {},
}
PLACES = {
    "GPT2LMHeadModel": "transformer.h.{}.attn",
    "GPTNeoXForCausalLM": "gpt_neox.layers.{}.attention",
    **dict.fromkeys(BERTS, "encoder.layer.{}.attention.self"),
    "ViTForImageClassification": "vit.layers.{}.attention",
    "timm": "blocks.{}.attn",
}
KINDS = ("GPT2LMHeadModel", "GPTNeoXForCausalLM", "BertModel", "ViTForImageClassification", "timm")


def timm_vit(**changes):
    pytest.importorskip("timm")
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    options = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 7}
    model = VisionTransformer(**(options | changes)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # timm starts so small that attention hardly matters
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def model_of(name, **changes):
    return timm_vit(**changes) if name == "timm" else build(name, **(CONFIGS[name] | changes))


def call_of(name):
    """The outputs that count."""
    if name in DECODERS:
        return families.real_logits(9, 5)
    if name in BERTS:
        return lambda model: model(IDS, attention_mask=MASK).last_hidden_state[MASK.bool()]
    return (lambda model: model(IMAGES)) if name == "timm" else lambda model: model(pixel_values=IMAGES).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_teacher_mode_is_the_model(name):
    model, shape = model_of(name), LayerShape(4, 4, 8, 32, causal=name in DECODERS)
    families.check_parts(model, [PLACES[name].format(i) for i in range(2)], shape)
    families.check_teacher(model, call_of(name))
    if name == "GPT2LMHeadModel":
        families.check_parts(model.transformer, ["h.0.attn", "h.1.attn"], shape)  # of a model without its head


def test_rotary_positions_on_a_part_of_the_channels():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    model = model_of("GPTNeoXForCausalLM", rope_parameters=rope)
    assert model.gpt_neox.layers[0].attention.rotary_ndims == 2
    families.check_teacher(model, call_of("GPTNeoXForCausalLM"))


def test_a_family_of_the_same_shape_is_one_row(monkeypatch):
    """Granite has Llama's projections, and a scale of its logits of its own."""
    monkeypatch.setattr(table, "_ADAPTERS", list(FAMILIES))
    sizes = {**WIDE, "num_key_value_heads": 2, "attention_multiplier": 0.5}
    model = build("GraniteForCausalLM", **sizes)
    with pytest.raises(ValueError, match=r"no adapter knows Granite[\s\S]*register_adapter[\s\S]*llama"):
        find_adapter(model)
    row = Family(model_types=("granite",), inside="self_attn", projections=SEPARATE, output="o_proj", rotary=True)
    register_adapter(row)
    families.check_teacher(model, call_of(DECODERS[0]))
    families.check_generation(converted(model, "features", mechanism="elu"))


@pytest.mark.parametrize("kind", ["norms", "gated"])
def test_norms_and_gates_of_timm(kind):
    from timm.layers import Attention

    class Gated(Attention):
        def __init__(self, *args, **options):
            super().__init__(*args, gated=True, **options)

    changes = {"norms": {"qk_norm": True, "scale_attn_norm": True}, "gated": {"attn_layer": Gated}}[kind]
    families.check_teacher(timm_vit(**changes), call_of("timm"))


@pytest.mark.parametrize("name", KINDS)
def test_features_change_the_attention_and_no_weight(name):
    """Another attention, the same weights under the same names; and zeros_softmax starts without loss."""
    model, call = model_of(name), call_of(name)
    expected, weights = call(model), model.state_dict()
    for options in families.MECHANISMS:
        student = converted(model, "features", **options)
        got, kept = call(student), student.state_dict()
        assert got.isfinite().all()
        assert not torch.allclose(got, expected, atol=1e-3)
        assert all(torch.equal(kept[name], weight) for name, weight in weights.items())
        assert all(".core." in name for name in kept.keys() - weights.keys())
    assert_close(call(converted(model, "zeros_softmax")), expected, **CLOSE)


@pytest.mark.parametrize("name", DECODERS)
def test_generation(name):
    model = model_of(name)
    for method, options in (("features", families.MECHANISMS[0]), ("features", families.MECHANISMS[1]),
                            ("still", {"window": 4, "ratio": 0.25, "sinks": 1})):  # fmt: skip
        families.check_generation(converted(model, method, **options))


def test_a_decoder_among_encoders_is_causal_and_generates():
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(**families.SIZES, **WIDE, is_decoder=True)
    student = converted(transformers.BertLMHeadModel(config).double().eval(), "features", mechanism="elu")
    assert find_adapter(student).sites(student)[0].shape.causal
    families.check_generation(student)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", *BERTS])
def test_learned_positions_end(name):
    """A model of learned positions takes as many tokens as its adapter says, and no more."""
    model = model_of(name, **({} if name == "GPT2LMHeadModel" else {"max_position_embeddings": 20}))
    most = {"GPT2LMHeadModel": 32, "BertModel": 20, "ElectraModel": 20}.get(name, 18)  # less the number of padding
    assert find_adapter(model).most_tokens(model) == most
    model(torch.full((1, most), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, most + 1), 5))


@pytest.mark.parametrize("options", families.MECHANISMS, ids=lambda options: options["mechanism"])
def test_a_padded_batch_of_an_encoder_is_its_rows_one_by_one(options):
    student = converted(model_of("BertModel"), "features", **options)
    together = student(IDS, attention_mask=MASK).last_hidden_state
    assert_close(together[0], student(IDS[:1]).last_hidden_state[0], **CLOSE)
    assert_close(together[1, :5], student(IDS[1:, :5]).last_hidden_state[0], **CLOSE)


def test_positions_count_from_the_first_real_token():
    """Features of turned keys depend on where counting starts, unlike softmax."""
    student = converted(model_of("GPTNeoXForCausalLM"), "features", mechanism="elu")
    ids, mask = padded(9, 5)
    together = student(ids, attention_mask=mask, use_cache=False).logits
    assert_close(together[1, 4:], student(ids[1:, 4:], use_cache=False).logits[0], **CLOSE)


def test_what_does_not_fit_is_refused():
    bert, gpt2 = model_of("BertModel"), model_of("GPT2LMHeadModel")
    for method in ("still", "lolcats"):
        with pytest.raises(ValueError, match="bidirectional"):
            converted(bert, method)
    student, positions = converted(gpt2, "features", mechanism="elu"), torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(ValueError, match="packed sequences"):
        student(padded(6)[0], position_ids=positions, use_cache=False)
    from timm.models.vision_transformer import ParallelScalingBlock

    for changes, kind in (({"block_fn": ParallelScalingBlock}, "ParallelScalingBlock"),
                          ({"attn_layer": "diff"}, "DiffAttention")):  # fmt: skip
        other = timm_vit(**changes)
        site = find_adapter(other).sites(other)[0]
        assert kind in site.why_not


def test_masks_of_timm_are_padding_or_refused():
    """A hidden token is as one that is not there."""
    attention = converted(timm_vit(), "features", mechanism="elu").blocks[0].attn
    x = torch.randn(2, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[1, ..., 4:] = False
    expected = attention(x[1:, :4])[0]
    assert_close(attention(x, attn_mask=mask)[1, :4], expected, **CLOSE)
    added = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(~mask, -torch.inf).expand(2, 1, 6, 6)
    assert_close(attention(x, attn_mask=added)[1, :4], expected, **CLOSE)
    for options, message in (({"attn_mask": torch.ones(1, 1, 6, 6).bool().tril()}, "padding only"),
                             ({"is_causal": True}, "is_causal=True")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            attention(x, **options)
