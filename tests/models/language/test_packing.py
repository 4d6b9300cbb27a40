"""Documents packed into one row as collators of transformers pack them: each is read as if it were alone."""

import pytest
import torch

from models.language.small import TOLERANCE, build, draw, left_padded

pytest.importorskip("transformers", reason="the extra hf is not installed")

LENGTHS = (4, 1, 6, 9)
PARTED = ["elu", "retention", "gated", "lion", "mlstm", "softmax", "window", "zeros_softmax"]  # each kind of state
WORDS = [
    {},
    {"return_flash_attn_kwargs": True, "return_position_ids": False},
    {"return_seq_idx": True, "return_position_ids": False},
    {"return_seq_idx": True, "return_flash_attn_kwargs": True},
]


def documents():
    return [draw(1, length, seed=length)[0] for length in LENGTHS]


def flattened(**words):
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening(**words)([{"input_ids": text.tolist()} for text in documents()], "pt")


def one_by_one(model):
    """Logits of each document alone, and the mean loss of all their tokens that have one before them."""
    found = [model(text[None], labels=text[None]) for text in documents()]
    real = [(out.loss, len(text) - 1) for out, text in zip(found, documents(), strict=True) if len(text) > 1]
    mean = sum(loss * count for loss, count in real) / sum(count for _, count in real)
    return torch.cat([out.logits for out in found], dim=1), mean


@pytest.mark.parametrize("mechanism", PARTED)
def test_positions_that_restart_part_the_documents(mechanism):
    model = build(mechanism=mechanism, canon="ABCD")
    logits, loss = one_by_one(model)
    out = model(**flattened())
    torch.testing.assert_close(out.logits, logits, **TOLERANCE)
    torch.testing.assert_close(out.loss, loss)
    assert out.past_key_values is None
    masked = model(**flattened(), attention_mask=torch.ones(1, sum(LENGTHS)))  # hides nothing
    torch.testing.assert_close(masked.logits, logits, **TOLERANCE)


@pytest.mark.parametrize("words", WORDS, ids=str)
def test_every_word_a_collator_has_for_it(words):
    model = build(mechanism=["gated", "softmax"], canon="ABCD")
    logits, loss = one_by_one(model)
    batch = flattened(**words)
    unlabelled = batch["input_ids"]  # labels that nobody parted
    for labels in (batch["labels"], unlabelled):
        out = model(**batch | {"labels": labels})
        torch.testing.assert_close(out.logits, logits, **TOLERANCE)
        torch.testing.assert_close(out.loss, loss)


def test_an_encoder_reads_them_as_well():
    model = build("ForMaskedLM", mechanism=["relu", "softmax"], causal=False, canon="AC")
    logits = torch.cat([model(text[None]).logits for text in documents()], dim=1)
    for words in WORDS:
        found = model(**{name: x for name, x in flattened(**words).items() if name != "labels"}).logits
        torch.testing.assert_close(found, logits, **TOLERANCE)


def test_positions_may_begin_anywhere():
    model = build()
    found = model(**flattened(position_ids_start=2)).logits
    alone = [model(text[None], position_ids=torch.arange(len(text))[None] + 2).logits for text in documents()]
    torch.testing.assert_close(found, torch.cat(alone, dim=1), **TOLERANCE)


def test_positions_that_only_rise_part_nothing():
    """Gaps are those of one text; padding may have any position."""
    model, ids = build(), draw(1, 6)
    gaps = torch.tensor([[0, 1, 2, 7, 8, 30]])
    two = torch.cat([ids, ids])
    torch.testing.assert_close(
        model(ids, position_ids=gaps).logits, model(two, position_ids=gaps).logits[:1], **TOLERANCE
    )
    assert model(ids, position_ids=gaps, use_cache=True).past_key_values is not None
    rows, mask = left_padded([ids[0, :3], ids[0]], 6)
    places = torch.tensor([[1, 1, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    found = model(rows, attention_mask=mask, position_ids=places, labels=rows)
    torch.testing.assert_close(found.logits[1:], model(ids).logits, **TOLERANCE)
    torch.testing.assert_close(found.loss, model(rows, attention_mask=mask, labels=rows).loss)


HIDDEN = torch.ones(1, sum(LENGTHS), dtype=torch.long)
HIDDEN[:, -1] = 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": [0, 4, 9]}, "cu_seqlens must be a tensor of offsets, got list"),
        ({"attention_mask": HIDDEN}, "position_ids restart at token 4 of row 0, .* leave it out"),
        ({"use_cache": True}, "position_ids restart .* leave past_key_values and use_cache out"),
        (
            {"cu_seqlens": torch.tensor([0, 20]), "cu_seq_lens_q": torch.tensor([0, 4, 20])},
            "cu_seq_lens_q and cu_seqlens",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 4, 20]), "cu_seq_lens_k": torch.tensor([0, 5, 20])},
            "cu_seq_lens_k and cu_",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_packed_is_named(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()(**flattened() | changes)


def test_several_rows_and_a_cache_are_refused():
    model, batch = build(), flattened()
    row, places = batch["input_ids"], batch["position_ids"]
    message = "position_ids restart at token 4 of row 0, .* cu_seqlens"
    for given in (places, places.repeat(2, 1)):
        with pytest.raises(ValueError, match=message):
            model(row.repeat(2, 1), position_ids=given)
    cache = model(draw(1), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"position_ids restart .* leave past_key_values"):
        model(row, position_ids=places + 11, past_key_values=cache)
    with pytest.raises(ValueError, match=r"seq_idx must be \(1, tokens\), got \(2, 20\)"):
        model(row.repeat(2, 1), seq_idx=places.repeat(2, 1))
    classifier = build("ForSequenceClassification", num_labels=3)
    with pytest.raises(ValueError, match=r"position_ids restart .* a class is that of a whole row"):
        classifier(row, position_ids=places)
    with pytest.raises(TypeError, match="takes no 'cu_seq_lens_q'"):
        classifier(row, cu_seq_lens_q=torch.tensor([0, 20]))


def test_compiled_code_that_cannot_look_fails_where_they_restart():
    """It would let documents see one another without a word."""
    model, batch = build(num_hidden_layers=1), flattened(return_flash_attn_kwargs=True)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    row, places = batch["input_ids"], batch["position_ids"]
    rising = torch.arange(row.shape[1])[None]
    found = compiled(row, position_ids=rising, use_cache=False).logits
    torch.testing.assert_close(found, model(row, use_cache=False).logits, **TOLERANCE)
    with pytest.raises(RuntimeError, match=r"position_ids restart .* pass cu_seqlens"):
        compiled(row, position_ids=places, use_cache=False)
    found = compiled(row, position_ids=places, cu_seq_lens_q=batch["cu_seq_lens_q"], use_cache=False).logits
    torch.testing.assert_close(found, one_by_one(model)[0], **TOLERANCE)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="seq_idx cannot be read in compiled code"):
        compiled(row, seq_idx=(places == 0).cumsum(-1), use_cache=False)
