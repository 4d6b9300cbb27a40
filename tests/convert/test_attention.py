"""The module in the place of the model's attention: each family as before in teacher mode, and one thing as student."""

import pytest
import torch
from tests.convert.causal import CLOSE, FAMILIES, build, converted, logits, padded
from torch.testing import assert_close

from linattn.convert.convert import convert, linearized_layers, observing, plan_model, set_mode

STILL = {"window": 4, "ratio": 1 / 4, "sinks": 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_teacher_mode_and_full_windows_are_the_model_it_was(family):
    """With left padding; Gemma's window layers are kept, and its logits have a scale of their own."""
    model, (ids, mask) = build(family), padded(19, 12)
    wanted = logits(model, ids, mask)
    convert(model, plan_model(model, "still", window=19))
    model.double()
    assert_close(logits(model, ids, mask), wanted, rtol=1e-5, atol=1e-5)
    for layer in linearized_layers(model).values():
        layer.core.plan = None  # nothing linear may run
    set_mode(model, "teacher")
    assert_close(logits(model, ids, mask), wanted, rtol=1e-5, atol=1e-5)
    first = model(ids[:, :15], attention_mask=mask[:, :15], use_cache=True)
    rest = logits(model, ids[:, 15:], mask, past_key_values=first.past_key_values)
    assert_close(rest, wanted[:, 15:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3"])
def test_steps_prefill_and_recomputing_agree_with_left_padding(family):
    model, (ids, mask) = converted("still", family, **STILL), padded(23, 14)
    whole = logits(model, ids, mask)
    assert_close(whole[1:, 9:], logits(model, ids[1:, 9:]), **CLOSE)
    found, cache = [], None
    for end in (10, 19, 20, 21, 22, 23):  # a prefill in two pieces, then token by token
        start = 0 if cache is None else cache.get_seq_length()
        with torch.no_grad():
            out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        found.append(out.logits)
        cache = out.past_key_values
    assert_close(torch.cat(found, 1) * mask.unsqueeze(-1), whole, **CLOSE)
    assert not torch.allclose(whole[:, 15:], logits(build(family), ids, mask)[:, 15:], atol=1e-2)


def test_observers_see_what_the_teacher_did_and_may_learn_from_it():
    model, (ids, mask) = converted("still", **STILL), padded(19, 12)
    set_mode(model, "teacher")
    wanted = logits(model, ids, mask)
    set_mode(model, "student")
    seen = {}

    def learn(observation):
        layer = linearized_layers(model)[observation.layer_idx]
        student = layer.core(observation.q, observation.k, observation.v, key_mask=observation.key_mask)
        (student - observation.output)[observation.key_mask[:, None].expand(2, 4, 19)].square().mean().backward()
        seen[observation.layer_idx] = observation

    with observing(model, learn):
        assert_close(logits(model, ids, mask), wanted, **CLOSE)
    assert sorted(seen) == [0, 1]
    for index, layer in linearized_layers(model).items():
        assert layer.mode == "student"
        assert layer.observe is None
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.core.parameters())
        assert layer.q_proj.weight.grad is None
        assert seen[index].x.shape == (2, 19, 32)
        assert torch.equal(seen[index].key_mask, mask.bool())
        q, k, v = (tensor[0] for tensor in seen[index][1:4])  # its row has no padding
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        scores = (q @ k.mT * 8**-0.5).masked_fill(~torch.ones(19, 19).tril().bool(), -torch.inf)
        assert_close(seen[index].output[0], scores.softmax(-1) @ v, rtol=1e-7, atol=1e-7)


def test_a_mode_is_restored_after_an_error():
    model = converted("lolcats", window=4)
    with pytest.raises(RuntimeError, match="stop"), observing(model, _stop):
        model(padded(5)[0])
    assert {layer.mode for layer in linearized_layers(model).values()} == {"student"}


def _stop(observation):
    raise RuntimeError("stop")


def test_gradients_reach_the_old_weights_and_checkpointing_changes_none():
    model, (ids, mask) = converted("still", **STILL), padded(19, 12)
    gradients = []
    for checkpointing in (False, True):
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(g is not None and g.abs().sum() > 0 for g in gradients[0].values())
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, msg=name)


@torch.no_grad()
def test_a_bf16_model_works():
    model, (ids, mask) = converted("still", **STILL), padded(19, 12)
    wanted = logits(model, ids, mask)
    plain = build()
    plain_error = (logits(plain.bfloat16(), ids, mask).double() - logits(build(), ids, mask)).abs().amax()
    model.bfloat16()
    for layer in linearized_layers(model).values():
        layer.core.float()
    error = (logits(model, ids, mask).double() - wanted).abs().amax()
    assert error <= 2 * (plain_error + 2**-8 * wanted.abs().amax())
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert tokens.shape == (2, 22)


@torch.no_grad()
def test_masks_of_pairs_are_read_or_refused():
    model, (ids, mask) = converted("still", **STILL), padded(9, 5)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    pairs = torch.ones(9, 9).tril().bool() & mask.bool()[:, None, None]
    wanted = logits(model, ids, mask)
    for given in (pairs, torch.where(pairs, 0.0, torch.finfo(torch.float32).min).double()):
        found = model(ids, attention_mask=given, position_ids=positions).logits
        assert_close(found * mask.unsqueeze(-1), wanted, **CLOSE)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with pytest.raises(ValueError, match="packed sequences"):
        model(ids[:1], position_ids=packed, use_cache=False)
