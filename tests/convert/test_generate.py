"""A converted model generates as transformers' models do, and padding changes nothing in it."""

import pytest
import torch
from tests.convert.causal import CLOSE, converted, padded
from torch.testing import assert_close

from linattn.convert.convert import set_mode

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
