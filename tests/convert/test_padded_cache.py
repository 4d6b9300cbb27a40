"""What a converted model's cache knows of padding, and collators' words for packed rows, which it does not know."""

import pytest
import torch
from tests.convert.causal import CLOSE, converted, logits, padded
from torch.testing import assert_close

from linattn.convert.convert import set_mode

STILL = {"window": 4, "ratio": 1 / 4, "sinks": 1}


def go_on(model, cache, ids, pieces):
    return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(pieces, dim=1)], dim=1)


@pytest.mark.parametrize(
    ("method", "family", "options"),
    [("still", "Llama", STILL), ("hedgehog", "Qwen2", {}), ("features", "Qwen3", {"mechanism": "mirror"})],
)
@torch.no_grad()
def test_no_mask_is_needed_behind_a_padded_prompt(method, family, options):
    model, (ids, mask) = converted(method, family, **options), padded(14, 6)
    wanted = logits(model, ids, mask)[:, 10:]
    cache = model(ids[:, :7], attention_mask=mask[:, :7], use_cache=True).past_key_values
    model(ids[:, 7:10], attention_mask=mask[:, :10], past_key_values=cache)  # padding in a second piece
    assert_close(go_on(model, cache, ids[:, 10:], (1, 1, 2)), wanted, **CLOSE)


@torch.no_grad()
def test_rows_take_their_padding_along():
    model, (ids, mask) = converted("still", **STILL), padded(11, 6)
    rows = [1, 1, 0]
    wanted = logits(model, ids, mask)[rows, 8:]
    cache = model(ids[:, :8], attention_mask=mask[:, :8], use_cache=True).past_key_values
    cache.reorder_cache(torch.tensor(rows))
    assert_close(go_on(model, cache, ids[rows, 8:], 1), wanted, **CLOSE)


@torch.no_grad()
def test_a_mask_that_says_otherwise_is_refused():
    model, (ids, mask) = converted("still", **STILL), padded(11, 6)
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask hides \[0, 0\] of the 11 tokens .* \[0, 5\] were padding"):
        model(ids[:, :2], attention_mask=torch.ones(2, 13), past_key_values=cache)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask hides \[0, 5\] of the 11 tokens .* \[0, 0\] were padding"):
        model(ids[:, :2], attention_mask=torch.cat([mask, mask[:, -2:]], dim=1), past_key_values=cache)


@pytest.mark.parametrize(("family", "layers"), [("Gemma3", None), ("Llama", [0]), ("Llama", [1])])
@torch.no_grad()
def test_layers_that_keep_their_keys_need_the_mask(family, layers):
    model, (ids, mask) = converted("still", family, layers=layers, **STILL), padded(11, 6)
    cache = model(ids[:, :8], attention_mask=mask[:, :8], use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask must be given, .* not converted"):
        model(ids[:, 8:9], past_key_values=cache)
    cache = model(ids[:, :8], attention_mask=mask[:, :8], use_cache=True).past_key_values
    found = model(ids[:, 8:], attention_mask=mask, past_key_values=cache).logits
    assert_close(found, logits(model, ids, mask)[:, 8:], **CLOSE)
    cache = model(ids[:1, :8], use_cache=True).past_key_values  # nothing is padded: nothing is asked for
    assert_close(go_on(model, cache, ids[:1, 8:], 1), logits(model, ids[:1])[:, 8:], **CLOSE)


@pytest.mark.parametrize("mode", ["student", "teacher"])
@pytest.mark.parametrize("words", [{"return_flash_attn_kwargs": True}, {"return_seq_idx": True}], ids=str)
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_packed_rows_are_refused_however_they_are_told(family, words, mode):
    """Layers would read one text where there are several."""
    from transformers import DataCollatorWithFlattening

    model = converted("still", family, **STILL)
    set_mode(model, mode)
    texts = [{"input_ids": [1, 2, 3, 4]}, {"input_ids": [5, 6, 7]}]
    with pytest.raises(ValueError, match=r"packed sequences, and (cu_seq_lens_q|seq_idx) tells"):
        model(**DataCollatorWithFlattening(**words, return_position_ids=False)(texts, "pt"))
    with pytest.raises(ValueError, match="packed sequences, and cu_seqlens tells"):
        model(torch.arange(7)[None], cu_seqlens=torch.tensor([0, 4, 7]))
    with pytest.raises(ValueError, match=r"position_ids restart at token 4 of row 0, .* no packed sequences"):
        model(**DataCollatorWithFlattening()(texts, "pt"))
