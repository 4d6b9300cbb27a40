"""Perplexity, decoding and samples, against what is computed token by token."""

from itertools import count
from math import log

import pytest
import torch
import torch.nn.functional as F
from tests.convert.evaluate.tiny import Known, tiny_llama

from linattn.convert.evaluate import measures as file
from linattn.convert.evaluate.measures import decoding, gain, losses_of_windows, perplexity_of, samples, token_losses


def by_hand(model, texts, length):
    """Token by token, in fp64, from prefixes that begin where a window does."""
    nats, tokens = 0.0, 0
    for text in texts:
        for start in range(0, len(text), length):
            window = text[start : start + length]
            for i in range(1, len(window)):
                logits = model(window[:i].unsqueeze(0)).logits[0, -1].double()
                nats -= float(logits.log_softmax(-1)[window[i]])
                tokens += 1
    return nats / tokens, tokens


def test_perplexity_is_that_of_every_token_given_those_before_it_in_its_window():
    torch.manual_seed(0)
    model = tiny_llama()
    texts = [torch.randint(256, (n,)) for n in (13, 4, 9)]  # 9 leaves a window of a single token, which predicts none
    with torch.no_grad():
        nats, tokens = by_hand(model, texts, 4)
    for batch_size in (1, 3):
        found = perplexity_of(losses_of_windows(model, texts, 4, batch_size=batch_size))
        assert found["tokens"] == tokens == 3 * 3 + 3 + 2 * 3
        assert found["nats"] == pytest.approx(nats, abs=1e-5)
        assert found["perplexity"] == pytest.approx(torch.tensor(nats).exp().item(), rel=1e-5)
    assert [n for _, n in losses_of_windows(model, texts, 4, windows=1)] == [3, 3, 3]
    alone, together = (losses_of_windows(model, texts, 10, batch_size=size) for size in (1, 4))
    assert [n for _, n in together] == [9, 2, 3, 8]  # windows of different lengths side by side
    assert [nats for nats, _ in together] == pytest.approx([nats for nats, _ in alone], abs=1e-4)


def test_even_logits_cost_the_logarithm_of_the_vocabulary_and_the_model_is_left_as_it_was():
    model = Known(lambda ids: torch.zeros(*ids.shape, 256)).train()
    found = losses_of_windows(model, [list(range(10))], 5, batch_size=2)
    assert perplexity_of(found)["nats"] == pytest.approx(log(256))
    assert model.training
    assert model.calls == [(2, 5)]
    with pytest.raises(ValueError, match="at least one of two tokens"):
        losses_of_windows(model, [[1]], 4)


def test_losses_in_parts_are_those_of_the_whole(monkeypatch):
    logits, targets = torch.randn(2, 5, 7).bfloat16(), torch.randint(7, (2, 5))
    whole = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none").view(2, 5)
    monkeypatch.setattr(file, "ROWS", 21)
    assert (token_losses(logits, targets) - whole).abs().max() < 1e-6


def test_a_gain_is_measured_window_by_window():
    torch.manual_seed(0)
    hard = (3 * torch.randn(40)).abs().tolist()
    worse = [(7 * (x + 0.1), 7) for x in hard]
    better = [(7 * x, 7) for x in hard]
    mean, error = gain(worse, better)
    assert mean == pytest.approx(0.1)
    assert error < 1e-6  # windows differ by far more than 0.1, but alike for both
    assert gain([(7.0, 7)], [(3.5, 7)])[1] == float("inf")


def test_the_cache_of_softmax_is_its_keys_and_values_at_each_context(monkeypatch):
    model, ticks = tiny_llama(), count(0, 0.5)
    monkeypatch.setattr(file, "_now", lambda device: next(ticks))  # every call takes half a second
    rows = decoding(model, [40, 16], text=range(50), steps=3, piece=7)
    each = 2 * 2 * 2 * 8 * 4  # layers, keys and values, key heads, channels, bytes
    assert [(row["context"], row["cache_bytes"]) for row in rows] == [(16, 16 * each), (40, 40 * each)]
    assert all(row["tokens_per_second"] == 2 for row in rows)
    assert decoding(model, [16, 64], text=range(50), steps=3, piece=7, seconds=0.0) == []


def test_what_is_read_in_pieces_and_decoded_is_the_sequence_itself():
    """The same tokens reach the model, whatever the pieces: text first, then what it decodes itself."""
    seen = {}
    for piece in (5, 64):
        model, ids = tiny_llama(), []
        model.register_forward_pre_hook(lambda module, args, ids=ids: ids.extend(args[0][0].tolist()))
        decoding(model, [12, 20], text=torch.arange(9), steps=2, piece=piece)
        seen[piece] = ids
    assert seen[5] == seen[64]
    assert seen[5][:12] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2]
    assert seen[5][14:20] == [5, 6, 7, 8, 0, 1]  # two decoded tokens count as read


def test_samples_are_what_greedy_decoding_writes():
    class Letters:
        pad_token_id, eos_token_id = None, None

        def __call__(self, text, return_tensors):
            return {"input_ids": torch.tensor([list(text.encode())])}

        def decode(self, ids, skip_special_tokens):
            return ",".join(map(str, ids.tolist()))

    model = tiny_llama()
    found = samples(model, Letters(), ["ab", "cde"], max_new_tokens=3)
    for prompt, text in zip((b"ab", b"cde"), found, strict=True):  # the shorter one does not see what is before it
        ids = torch.tensor([list(prompt)])
        for _ in range(3):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        assert text == ",".join(map(str, ids[0, -3:].tolist()))
    assert samples(model, Letters(), []) == []
