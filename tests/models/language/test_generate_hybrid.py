"""Hybrids under the ways to generate that change a cache, and what a state cannot do, which is said by name."""

import pytest
import torch

from models.language.small import build, draw, left_padded

pytest.importorskip("transformers", reason="the extra hf is not installed")

HYBRID = {"mechanism": ["softmax", "window", "gated"], "num_hidden_layers": 3, "canon": "AbCD",
          "mechanism_options": [{}, {"window": 3}, {}]}  # fmt: skip
NEW = 5


def generate(model, ids, mask=None, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(ids, attention_mask=mask, **settings)


def rows():
    return [draw(1, length, seed=length)[0] for length in (3, 11)]


def states(model, ids, mask=None):
    return model(ids, attention_mask=mask, use_cache=True).past_key_values


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3, "num_return_sequences": 2, "prefill_chunk_size": 4},
        {"num_beams": 2, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2, "eos_token_id": [3, 17, 5]},
        {"guidance_scale": 1.7},
    ],
    ids=["beams", "penalties", "guidance"],
)
def test_each_padded_row_says_what_it_says_alone_without_a_cache(options):
    model, (ids, mask), count = build(**HYBRID), left_padded(rows(), 11), options.get("num_return_sequences", 1)
    found = generate(model, ids, mask, **options)[:, 11:].unflatten(0, (2, count))
    uncached = {name: x for name, x in options.items() if name != "prefill_chunk_size"} | {"use_cache": False}
    for row, answers in zip(rows(), found, strict=True):
        alone = generate(model, row[None], **uncached)[:, len(row) :]
        width = max(alone.shape[1], answers.shape[1])  # rows that ended are filled with zeros
        both = [torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in (alone, answers)]
        assert torch.equal(*both)


def test_one_prompt_for_several_texts_of_different_lengths():
    """Its state is read once, repeated, and goes on behind padding that stands between the prompt and the rest."""
    model, prompt, (ids, mask) = build(**HYBRID), draw(1, 6, seed=2), left_padded(rows(), 11)
    cache = states(model, prompt)
    cache.batch_repeat_interleave(2)
    whole = [torch.cat([torch.cat([x, x]), part], 1) for x, part in ((prompt, ids), (torch.ones_like(prompt), mask))]
    found = generate(model, *whole, past_key_values=cache)
    for row, answer in zip(rows(), found, strict=True):
        alone = generate(model, torch.cat([prompt[0], row])[None], use_cache=False)
        assert torch.equal(answer[17:], alone[0, 6 + len(row) :])


def test_beams_behind_a_prompt_need_a_copy_for_each():
    model, prompt, more = build(**HYBRID), draw(1, 6), draw(1, 2, seed=3)
    text = torch.cat([prompt, more], dim=1)
    with pytest.raises(ValueError, match=r"states of 1 rows, but input_ids has 3 rows: .*batch_repeat_interleave"):
        generate(model, text, past_key_values=states(model, prompt), num_beams=3)
    cache = states(model, prompt)
    cache.batch_repeat_interleave(3)
    found = generate(model, text, past_key_values=cache, num_beams=3)
    assert torch.equal(found, generate(model, text, num_beams=3, use_cache=False))
    with pytest.raises(ValueError, match="states of 2 rows, but input_ids has 1 rows"):
        model(more, past_key_values=states(model, torch.cat([prompt, prompt])))


def test_new_tokens_alone_go_on_beside_the_mask_of_the_whole():
    model, (ids, mask), more = build(**HYBRID), left_padded(rows(), 11), draw(2, 2, seed=3)
    whole = torch.cat([mask, torch.ones_like(more)], dim=1)
    found = generate(model, more, whole, past_key_values=states(model, ids, mask))
    expected = generate(model, torch.cat([ids, more], dim=1), whole, use_cache=False)
    assert torch.equal(found[:, 2:], expected[:, 13:])


@pytest.mark.parametrize("length", [4, 11])
def test_nothing_new_behind_a_cache_is_refused(length):
    """What it has read would be read a second time."""
    model, ids = build(), draw(1)
    with pytest.raises(ValueError, match=f"behind the 11 tokens that past_key_values has read, got {length}: give"):
        generate(model, ids[:, :length], past_key_values=states(model, ids))


def test_a_padded_prompt_needs_its_mask():
    model, (ids, mask) = build(), left_padded(rows(), 11)
    text = torch.cat([ids, draw(2, 2, seed=3)], dim=1)
    with pytest.raises(ValueError, match="attention_mask must be given"):
        model.generate(text, past_key_values=states(model, ids, mask), max_new_tokens=2, pad_token_id=0)


@pytest.mark.parametrize("name", ["static", "offloaded", "quantized", "paged"])
def test_caches_of_keys_and_values_are_refused_before_they_are_made(name):
    from transformers import GenerationConfig

    model, message = build(), f"cache_implementation must be None or 'dynamic', got '{name}'"
    with pytest.raises(ValueError, match=message):
        generate(model, draw(1), cache_implementation=name)
    with pytest.raises(ValueError, match=message):
        model.generate(draw(1), GenerationConfig(cache_implementation=name, max_new_tokens=2, pad_token_id=0))
    assert generate(model, draw(1), cache_implementation="dynamic").shape == (1, 11 + NEW)


def test_other_ways_that_need_keys_and_values_are_refused():
    from transformers import GenerationConfig

    model = build()
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        generate(model, draw(1), prompt_lookup_num_tokens=3)
    embeds = model.get_input_embeddings()(draw(1))
    with pytest.raises(ValueError, match="prefill_chunk_size cuts input_ids alone"):
        model.generate(inputs_embeds=embeds, prefill_chunk_size=4, max_new_tokens=2, pad_token_id=0)
    with pytest.raises(ValueError, match=r"continuous batching \(generate_batch\) shares out pages"):
        model.generate_batch([[1, 2, 3]], GenerationConfig(max_new_tokens=2, pad_token_id=0))


def test_a_text_that_outgrows_learned_positions_is_refused_where_it_does():
    model, (ids, mask) = build(**HYBRID | {"rotary": 0.0, "max_position_embeddings": 12}), left_padded(rows(), 11)
    assert generate(model, ids, mask, max_new_tokens=2).shape == (2, 13)  # the last token is not read
    with pytest.raises(ValueError, match=r"must not go beyond max_position_embeddings = 12 tokens, .* got 13"):
        generate(model, ids, mask, max_new_tokens=3)
