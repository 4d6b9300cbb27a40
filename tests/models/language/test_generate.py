"""Decoding with a state gives what reading all of the text again gives, however the prompt comes."""

import pytest
import torch

from linattn import list_mechanisms
from models.language.small import TOLERANCE, build, draw, greedy, left_padded

pytest.importorskip("transformers", reason="the extra hf is not installed")

CAUSAL = list_mechanisms(causal=True)
NEW = 6


def generate(model, ids, mask=None, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize("mechanism", CAUSAL)
def test_greedy_generation_is_recomputation(mechanism):
    model, ids = build(mechanism=mechanism, canon="ABCD"), draw()
    expected = greedy(model, ids, NEW)
    assert len(set(expected[:, ids.shape[1] :].flatten().tolist())) > 2  # a constant answer would prove nothing
    assert torch.equal(generate(model, ids), expected)


@pytest.mark.parametrize("mechanism", CAUSAL)
def test_left_padding_changes_nothing(mechanism):
    """Rows of 3, 7 and 11 tokens in one batch: each says what it says alone."""
    model = build(mechanism=mechanism, canon="AbCD")
    rows = [draw(1, length, seed=length)[0] for length in (3, 7, 11)]
    ids, mask = left_padded(rows, 11)
    found = generate(model, ids, mask)
    for row, answer in zip(rows, found, strict=True):
        assert torch.equal(answer[11:], generate(model, row[None])[0, len(row) :])


def test_a_hybrid_with_window_layers_generates():
    """Texts longer than the window, some of them padded, read in pieces; the other layers remember the rest."""
    mechanisms = {"mechanism": ["window", "gated", "window"], "num_hidden_layers": 3}
    model = build(**mechanisms, mechanism_options=[{"window": 3}, {}, {"window": 4}], canon="AbCD")
    ids, mask = left_padded([draw(1, length, seed=length)[0] for length in (3, 11)], 11)
    expected = greedy(model, ids, NEW, mask)
    assert torch.equal(generate(model, ids, mask, prefill_chunk_size=4), expected)
    far = ids.clone()
    far[1, 0] = 39  # beyond both windows together: only the state of the layer between them carries it
    assert not torch.equal(model(far, attention_mask=mask).logits[1, -1], model(ids, attention_mask=mask).logits[1, -1])


@pytest.mark.parametrize("mechanism", ["elu", "gated", "softmax"])
def test_padding_anywhere_changes_nothing_and_may_be_a_piece_of_its_own(mechanism):
    model, row = build(mechanism=mechanism, canon="ABCD"), draw(1, 6)
    whole = model(row, use_cache=False).logits
    for real in ([0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 1, 1, 1]):
        mask = torch.tensor([real])
        ids = torch.zeros(1, 8, dtype=torch.long)
        ids[mask.bool()] = row[0]
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(logits[mask.bool()], whole[0], **TOLERANCE)
        cache, found = None, []
        for end in range(1, 9):
            out = model(ids[:, end - 1 : end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
        torch.testing.assert_close(torch.cat(found, dim=1)[mask.bool()], whole[0], **TOLERANCE)
        assert cache.get_seq_length() == 8


def test_generation_goes_on_from_a_cache():
    from transformers import DynamicCache

    model, ids = build(mechanism="retention", canon="ABCD"), draw()
    cache = DynamicCache()
    first = generate(model, ids, past_key_values=cache)
    again = generate(model, first, past_key_values=cache)
    assert torch.equal(again, greedy(model, ids, 2 * NEW))
