"""Mechanisms by name inside models of transformers, on tiny random models in fp64: what differs is wrong."""

import pytest
import torch
from tests.convert.causal import CLOSE, padded
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

from linattn import mechanism_info  # noqa: E402
from linattn.convert.hf import interface  # noqa: E402

SIZES = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 48, "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": None,
         "bos_token_id": None}  # fmt: skip


def build(family="Llama", head="ForCausalLM", **changes):
    own = {"num_key_value_heads": 2} if family in ("Llama", "Mistral") else {}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SIZES | own | changes))
    name = "GPT2LMHeadModel" if family == "GPT2" else family + head
    return getattr(transformers, name)(config).double().eval()


def named(model, mechanism, options=None):
    interface.register(options)
    model.set_attn_implementation(interface.PREFIX + mechanism)
    return model


def draw(batch, length):
    return torch.randint(1, 40, (batch, length), generator=torch.Generator().manual_seed(1))


def logits(model, ids, mask=None):
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    return model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits


@pytest.mark.parametrize("mechanism", ["elu", "performer", "retention"])
def test_left_padding_changes_nothing(mechanism):
    model = named(build(num_key_value_heads=4), mechanism)
    ids, mask = padded(9, 5)
    together = logits(model, ids, mask)
    for i, start in enumerate((0, 4)):
        assert_close(together[i, start:], logits(model, ids[i : i + 1, start:])[0], **CLOSE)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Llama", {}), ("GPT2", {"scale_attn_by_inverse_layer_idx": True}), ("Mistral", {"sliding_window": 9})],
)
def test_the_softmax_mechanism_is_the_model_itself(family, changes):
    model = build(family, **changes)
    ids, mask = padded(9, 5)
    expected = logits(model, ids, mask)
    got = logits(named(model, "softmax"), ids, mask)
    assert_close(got[mask.bool()], expected[mask.bool()], **CLOSE)


@pytest.mark.parametrize("cache", [None, "static"])
def test_decoding_reads_the_growing_cache(cache):
    model = named(build(), "elu")
    ids, mask = padded(7, 4)
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, attention_mask=mask, cache_implementation=cache, **options)
    full = torch.cat([mask, mask.new_ones(2, 5)], dim=1)
    expected = logits(model, out.sequences, full)[:, 6:-1].float()  # generate keeps logits in fp32
    assert_close(torch.stack(out.logits, 1), expected, rtol=1e-5, atol=1e-5)
    assert out.past_key_values.get_seq_length() == 11


def test_an_encoder_is_bidirectional_and_padded_as_one_by_one():
    model = named(build("Bert", "Model"), "elu")
    ids = draw(2, 8)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    together = model(ids, attention_mask=mask).last_hidden_state
    assert_close(together[1, :5], model(ids[1:, :5]).last_hidden_state[0], **CLOSE)
    changed = ids.clone()
    changed[0, -1] = ids[0, -1] % 39 + 1
    assert not torch.allclose(model(changed).last_hidden_state[0, 0], model(ids).last_hidden_state[0, 0], atol=1e-6)


def test_options_reach_the_mechanism():
    """Two reflections start as the identity: plain ReLU features."""
    ids = draw(1, 6)
    options = {"mirror": {"reflections": 2, "cross_head": False, "modulation": "none"}}
    mirror = logits(named(build(), "mirror", options), ids)
    assert_close(mirror, logits(named(build(), "relu"), ids), rtol=1e-4, atol=1e-4)  # their eps differ
    with pytest.raises(ValueError, match="mechanism must be one of"):
        interface.register({"unheard": {}})


def test_every_mechanism_has_a_name_and_runs_or_says_why_not():
    model, ids = build(num_key_value_heads=4), draw(1, 6)
    for name in interface.register():
        info = mechanism_info(name.removeprefix(interface.PREFIX))
        model.set_attn_implementation(name)
        if info.uses_input:
            with pytest.raises(ValueError, match=r"takes its gates from the layer's input.*method='features'"):
                logits(model, ids)
        elif not info.causal:
            with pytest.raises(ValueError, match="is only bidirectional"):
                logits(model, ids)
        else:
            assert logits(model, ids).isfinite().all()


def test_what_linear_attention_cannot_do_is_refused():
    ids = draw(1, 9)
    model = named(build("GPT2"), "elu")
    with pytest.raises(ValueError, match="packed sequences"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), use_cache=False)
    with pytest.raises(ValueError, match="linattn_elu never has its weights"):
        named(build(), "elu")(ids, output_attentions=True)
    asked = named(build(output_attentions=True), "elu")
    with pytest.raises(ValueError, match="linattn_elu never has its weights"):
        asked(ids)
    assert asked(ids, output_attentions=False).attentions is None
    with pytest.raises(ValueError, match="2-D attention_mask"):
        model(ids, attention_mask=torch.ones(1, 1, 9, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="dropout to 0"):
        model.train()(ids)
    with pytest.raises(ValueError, match="sliding window shorter than the text"):
        named(build("Mistral", sliding_window=8), "elu")(ids, use_cache=False)
    with pytest.raises(ValueError, match=r"attention_mask must be \(B, 9\)"):
        named(build(), "elu")(ids, attention_mask=torch.ones(1, 4), use_cache=True)
