"""Steps of a converted model: the host asks nothing of the device, and a copy of the cache is a copy."""

import copy

import pytest
import torch
from tests.convert.causal import CLOSE, converted, logits, padded
from torch.testing import assert_close

from linattn.convert.layer.attention import linearized_layers
from linattn.ops.hybrid.decoding import DecodingState
from linattn.ops.hybrid.types import HybridState

STILL = {"window": 4, "ratio": 1 / 2, "cap": 5, "sinks": 1}


def step(model, ids, mask, cache, t):
    return model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("still", {**STILL, "gate": True}),
        ("still", {**STILL, "cap": None}),
        ("still", {**STILL, "score": "kl", "reduce": "max"}),
        ("lolcats", {"window": 4}),
    ],
)
@torch.no_grad()
def test_steps_of_a_padded_batch_ask_nothing_and_copies_go_their_own_way(method, options, monkeypatch):
    model, (ids, mask) = converted(method, **options), padded(31, 21)
    wanted = logits(model, ids, mask)
    cache = model(ids[:, :14], attention_mask=mask[:, :14], use_cache=True).past_key_values
    copies, asked, tolist = {}, [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: asked.append(x) or tolist(x))
    for t in range(14, 31):
        asked.clear()
        assert_close(step(model, ids, mask, cache, t), wanted[:, t : t + 1], **CLOSE)
        assert t == 14 or len(asked) == 1  # for the model's mask
        if t in (17, 22):
            copies[t] = copy.deepcopy(cache)
    assert isinstance(cache.layers[0].held, DecodingState)
    assert isinstance(cache.layers[0].state, HybridState)
    for t, copied in copies.items():
        assert_close(step(model, ids, mask, copied, t + 1), wanted[:, t + 1 : t + 2], **CLOSE)


def test_gradients_of_a_step_are_those_of_the_whole_and_leave_a_state_that_goes_on():
    model, (ids, mask) = converted("still", **STILL), padded(20)
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


def test_a_state_of_inference_mode_goes_on_without_it():
    model, (ids, mask) = converted("still", **STILL), padded(20)
    with torch.inference_mode():
        cache = model(ids[:, :14], use_cache=True).past_key_values
        step(model, ids, mask, cache, 14)
    with torch.no_grad():
        found = step(model, ids, mask, cache, 15)
    assert_close(found, logits(model, ids, mask)[:, 15:16], **CLOSE)


@torch.no_grad()
def test_a_switch_between_steps_needs_a_new_cache():
    """Without a choice from there on, the state would be that of another setting."""
    model, (ids, mask) = converted("still", **{**STILL, "cap": None}), padded(24)
    cache = model(ids[:, :14], use_cache=True).past_key_values
    step(model, ids, mask, cache, 14)
    for layer in linearized_layers(model).values():
        layer.core.zero_salient = True
    with pytest.raises(ValueError, match="budget must be that of the calls before"):
        step(model, ids, mask, cache, 15)
