"""The cache of a converted model: generation, steps, padding, and what a state cannot do."""

import copy

import pytest
import torch
from tests.convert.causal import CLOSE, converted, logits, padded
from torch.testing import assert_close

from linattn.convert.convert import linearized_layers, set_mode
from linattn.ops.hybrid.decoding import DecodingState
from linattn.ops.hybrid.types import HybridState

STILL = {"window": 4, "ratio": 1 / 4, "sinks": 1}
SETTINGS = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module", params=["mirror", "Gemma3"])
def model(request):
    if request.param == "mirror":
        return converted("features", mechanism="mirror")
    return converted("still", "Gemma3", cap=3, **STILL)  # with layers that keep their window


def test_beams_of_a_padded_batch_are_those_of_each_row_without_a_cache(model):
    ids, mask = padded(11, 6)
    settings = SETTINGS | {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True}
    both = model.generate(ids, attention_mask=mask, **settings)
    for row, start in ((0, 0), (1, 5)):
        alone = model.generate(ids[row : row + 1, start:], use_cache=False, **settings)
        assert both.sequences[row, start:].tolist() == alone.sequences[0].tolist()
        assert_close(both.sequences_scores[row], alone.sequences_scores[0], **CLOSE)


def test_prefill_in_chunks_and_a_static_cache_change_nothing():
    model, (ids, mask) = converted("still", **STILL), padded(11, 6)
    wanted = model.generate(ids, attention_mask=mask, **SETTINGS)
    assert torch.equal(model.generate(ids, attention_mask=mask, prefill_chunk_size=4, **SETTINGS), wanted)
    assert torch.equal(model.generate(ids, attention_mask=mask, cache_implementation="static", **SETTINGS), wanted)


def test_what_a_state_cannot_do_is_refused():
    from transformers import DynamicCache

    from linattn.convert.hf.converted import core_layer

    model, (ids, _) = converted("still", **STILL), padded(11)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(ids, assistant_model=converted("still", **STILL), **SETTINGS)
    with pytest.raises(TypeError, match="Cache of transformers, got tuple"):
        core_layer((), 0, masked=True)
    moved = DynamicCache()
    moved.offloading = True
    with pytest.raises(ValueError, match="offloaded"):
        core_layer(moved, 0, masked=True)
    cache = model(ids, use_cache=True).past_key_values
    set_mode(model, "teacher")
    with pytest.raises(TypeError, match="empty cache"):
        model(ids, past_key_values=cache)
    exact = model(ids, use_cache=True).past_key_values
    set_mode(model, "student")
    with pytest.raises(ValueError, match="empty cache"):
        model(ids, past_key_values=exact)


CAPPED = {"window": 4, "ratio": 1 / 2, "cap": 5, "sinks": 1}


def step(model, ids, mask, cache, t):
    return model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("still", {**CAPPED, "gate": True}),
        ("still", {**CAPPED, "cap": None}),
        ("still", {**CAPPED, "score": "kl", "reduce": "max"}),
        ("lolcats", {"window": 4}),
    ],
)
@torch.no_grad()
def test_steps_of_a_padded_batch_are_the_whole_and_copies_go_their_own_way(method, options):
    model, (ids, mask) = converted(method, **options), padded(31, 21)
    wanted = logits(model, ids, mask)
    cache = model(ids[:, :14], attention_mask=mask[:, :14], use_cache=True).past_key_values
    copies = {}
    for t in range(14, 31):
        assert_close(step(model, ids, mask, cache, t), wanted[:, t : t + 1], **CLOSE)
        if t in (17, 22):
            copies[t] = copy.deepcopy(cache)
    assert isinstance(cache.layers[0].held, DecodingState)
    assert isinstance(cache.layers[0].state, HybridState)
    for t, copied in copies.items():
        assert_close(step(model, ids, mask, copied, t + 1), wanted[:, t + 1 : t + 2], **CLOSE)


def test_gradients_of_a_step_are_those_of_the_whole_and_leave_a_state_that_goes_on():
    model, (ids, mask) = converted("still", **CAPPED), padded(20)
    with torch.no_grad():
        cache = model(ids[:, :14], use_cache=True).past_key_values
        step(model, ids, mask, cache, 14)
    held = cache.layers[0].held
    step(model, ids, mask, cache, 15).sum().backward()
    assert isinstance(held, DecodingState)
    assert isinstance(cache.layers[0].held, HybridState)
    assert all(p.grad is not None for layer in linearized_layers(model).values() for p in layer.core.parameters())
    with torch.no_grad():
        assert_close(step(model, ids, mask, cache, 16), logits(model, ids, mask)[:, 16:17], **CLOSE)


@torch.no_grad()
def test_a_switch_between_steps_needs_a_new_cache():
    """Without a choice from there on, the state would be that of another setting."""
    model, (ids, mask) = converted("still", **{**CAPPED, "cap": None}), padded(24)
    cache = model(ids[:, :14], use_cache=True).past_key_values
    step(model, ids, mask, cache, 14)
    for layer in linearized_layers(model).values():
        layer.core.zero_salient = True
    with pytest.raises(ValueError, match="budget must be that of the calls before"):
        step(model, ids, mask, cache, 15)


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
