"""A cache knows how much of each row was padding: positions go on from real tokens, whether a mask is given or not."""

import pytest
import torch

from models.language.small import TOLERANCE, build, draw

pytest.importorskip("transformers", reason="the extra hf is not installed")

LENGTHS, NEXT = (2, 5, 7), 3
HYBRID = {"mechanism": ["softmax", "gated", "window"], "num_hidden_layers": 3, "canon": "AbCD",
          "mechanism_options": [{}, {}, {"window": 3}]}  # fmt: skip
MASKS = {
    "left": [[0, 0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1, 1], [1] * 7],
    "right": [[1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [1] * 7],
    "between": [[0, 1, 0, 0, 0, 1, 0], [1, 1, 0, 1, 1, 0, 1], [1] * 7],
}
KINDS = [HYBRID, {"mechanism": "elu", "rotary": 0.0, "max_position_embeddings": 10}]


def prompt(side="left"):
    """Rows of 2, 5 and 7 tokens, the three that follow each, and both together for each row alone."""
    mask = torch.tensor(MASKS[side])
    ids = draw(*mask.shape) * mask
    following = draw(len(LENGTHS), NEXT, seed=9)
    texts = [torch.cat([row[real.bool()], more]) for row, real, more in zip(ids, mask, following, strict=True)]
    assert [len(text) - NEXT for text in texts] == list(LENGTHS)
    return ids, mask, following, texts


def alone(model, texts, rows=(0, 1, 2)):
    """Logits of what follows, of each row without padding."""
    return torch.stack([model(texts[row][None], use_cache=False).logits[0, -NEXT:] for row in rows])


def read(model, ids, mask):
    return model(ids, attention_mask=mask, use_cache=True).past_key_values


def go_on(model, cache, following, pieces=(1, 2)):
    parts = following.split(pieces, dim=1)
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)


@pytest.mark.parametrize("kind", KINDS, ids=["rotary", "learned"])
@pytest.mark.parametrize("side", list(MASKS))
def test_no_mask_is_needed_behind_a_padded_prompt(kind, side):
    model, (ids, mask, following, texts) = build(**kind), prompt(side)
    torch.testing.assert_close(go_on(model, read(model, ids, mask), following), alone(model, texts), **TOLERANCE)


def test_padding_in_the_first_of_several_pieces_and_in_what_follows():
    model, (ids, mask, following, texts) = build(**HYBRID), prompt()
    cache = read(model, ids[:, :4], mask[:, :4])
    model(ids[:, 4:5], attention_mask=mask[:, :5], past_key_values=cache)
    model(ids[:, 5:], past_key_values=cache)  # without padding, and without a mask
    late = torch.cat([mask, torch.tensor([[0], [1], [0]])], dim=1)
    model(following[:, :1], attention_mask=late, past_key_values=cache)  # only the second row goes on
    found = go_on(model, cache, following[:, 1:], (1, 1))
    texts = [text if row == 1 else torch.cat([text[:-NEXT], text[-2:]]) for row, text in enumerate(texts)]
    torch.testing.assert_close(found, alone(model, texts)[:, -2:], **TOLERANCE)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ],
)
def test_rows_take_their_padding_along(change, rows):
    model, (ids, mask, following, texts) = build(**HYBRID), prompt()
    cache = read(model, ids, mask)
    change(cache)
    assert cache.batch_size == len(rows)
    found = go_on(model, cache, following[rows])
    expected = [torch.cat([texts[row][:-NEXT], following[row]]) for row in rows]
    torch.testing.assert_close(found, alone(model, expected, range(len(rows))), **TOLERANCE)


@pytest.mark.parametrize("way", ["forward", "file", "generate"])
def test_a_mask_that_hides_what_was_read_as_text_is_refused(tmp_path, way):
    """Padding that was read without its mask is in the states for good: positions alone would leave it out."""
    from linattn.models.language import load_cache, save_cache

    model, (ids, mask, following, _) = build(), prompt()
    cache, full = read(model, ids, None), torch.cat([mask, torch.ones_like(following)], dim=1)
    if way == "file":
        save_cache(cache, tmp_path / "state")
        cache = load_cache(tmp_path / "state", model)
    options = {"max_new_tokens": 1, "pad_token_id": 0} if way == "generate" else {}
    call = model.generate if way == "generate" else model
    with pytest.raises(
        ValueError, match=r"attention_mask hides \[5, 2, 0\] of the 7 tokens .* \[0, 0, 0\] were padding"
    ):
        call(following, attention_mask=full, past_key_values=cache, **options)


def test_decoding_behind_padding_compiles():
    model, (ids, mask, following, texts) = build(num_hidden_layers=1), prompt()
    cache = read(model, ids, mask)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    found = [compiled(token, past_key_values=cache).logits for token in following.split(1, dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), alone(model, texts), **TOLERANCE)
