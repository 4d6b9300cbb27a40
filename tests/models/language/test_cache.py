"""The cache by itself: reordered, repeated, saved, and refused where it cannot serve."""

import pytest
import torch

from models.language.small import TOLERANCE, build, draw, left_padded

pytest.importorskip("transformers", reason="the extra hf is not installed")

MIXED = {"mechanism": ["softmax", "gated", "performer"], "num_hidden_layers": 3, "canon": "ABCD"}


def prefilled(model, ids):
    return model(ids, use_cache=True).past_key_values


def test_reset_starts_anew():
    model, ids = build(**MIXED), draw()
    cache = prefilled(model, ids)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(
        model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits, **TOLERANCE
    )


@pytest.mark.parametrize(
    "kind",
    [MIXED, *({"mechanism": name, "canon": "AbCD"} for name in ("softmax", "zeros_softmax", "window")),
     {"canon": "AbCD", "canon_kernel": 1}],
    ids=str,
)  # fmt: skip
def test_a_padded_state_in_a_file(tmp_path, kind):
    """Layers that share what they know of the padding; states that know how much of them is filled; empty ones."""
    from linattn.models.language import load_cache, save_cache

    model = build(**kind)
    ids, mask = left_padded([draw(1, length, seed=length)[0] for length in (4, 9)], 9)
    save_cache(model(ids[:, :6], attention_mask=mask[:, :6], use_cache=True).past_key_values, tmp_path / "state")
    cache = load_cache(tmp_path / "state", model)
    assert cache.get_seq_length() == 6
    found = model(ids[:, 6:], attention_mask=mask, past_key_values=cache).logits
    whole = model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found, whole[:, 6:], **TOLERANCE)


def test_a_file_of_something_else_is_refused(tmp_path):
    from safetensors.torch import save_file

    from linattn.models.language import load_cache, save_cache

    save_cache(prefilled(build(**MIXED), draw()), tmp_path / "state")
    (tmp_path / "letter").write_text("Dear reader")
    save_file({"1": torch.ones(1)}, tmp_path / "weights", {"lengths": "[1, 1]"})
    for name, changes, words in (
        ("state", {}, "states of 3 layers, but the model has 2"),
        ("state", {"num_hidden_layers": 3}, "state of another model"),
        ("letter", {}, "must be a file that save_cache wrote, and .*letter is none"),
        ("weights", {}, "must be a file that save_cache wrote"),
    ):
        with pytest.raises(ValueError, match=words):
            load_cache(tmp_path / name, build(**changes))


def test_an_empty_state_is_not_saved(tmp_path):
    from transformers import DynamicCache

    from linattn.models.language import save_cache
    from linattn.models.language.hf.cache import new_cache

    for empty in (new_cache(2), DynamicCache()):
        with pytest.raises(ValueError, match="the cache is empty"):
            save_cache(empty, tmp_path / "nothing")
    with pytest.raises(TypeError, match="must be a Cache of transformers, got str"):
        save_cache("nothing", tmp_path / "nothing")


@pytest.mark.parametrize(
    ("written", "read", "letter"),
    [
        ({"canon": "ABCD"}, {"canon": "ABD"}, "c"),
        ({"canon": None}, {"canon": "D"}, "d"),
        ({"canon": "A"}, {"canon": "A", "canon_kernel": 3}, "a"),
        ({"canon": "B"}, {"canon": "B", "num_key_value_heads": 4}, "b"),
    ],
)
def test_a_state_of_other_canon_layers_is_refused(tmp_path, written, read, letter):
    """They would begin anew, or what they knew would be left out, and the text would go on wrongly without a word."""
    from linattn.models.language import load_cache, save_cache

    save_cache(prefilled(build(**written), draw()), tmp_path / "state")
    with pytest.raises(ValueError, match=f"state of another model: Canon layer {letter} of layer 0"):
        load_cache(tmp_path / "state", build(**read))


def test_what_cannot_serve_is_named():
    from transformers import DynamicCache, StaticCache

    model, ids = build(), draw()
    with pytest.raises(TypeError, match="must be a Cache of transformers, got list"):
        model(ids, past_key_values=[])
    with pytest.raises(TypeError, match="must be a DynamicCache"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=20))
    foreign = DynamicCache()
    foreign.update(torch.ones(2, 2, 3, 8), torch.ones(2, 2, 3, 8), 0)
    with pytest.raises(ValueError, match="of another model"):
        model(ids, past_key_values=foreign)
    with pytest.raises(ValueError, match="has 3 layers, but the model has 2"):
        model(ids, past_key_values=prefilled(build(**MIXED), ids))
    with pytest.raises(ValueError, match=r"cannot go 2 tokens back"):
        prefilled(model, ids).crop(-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.ones(2, 5)}, r"\(batch, past \+ tokens\) = \(2, 11\).*got \(2, 5\)"),
        ({"attention_mask": torch.ones(2, 1, 11, 11)}, r"got \(2, 1, 11, 11\)"),
        (
            {"attention_mask": torch.zeros(2, 11).fill_(-torch.inf)},
            "must be 1 at real tokens .*, got -inf; .* mask == 0",
        ),
        ({"attention_mask": torch.full((2, 11), torch.nan)}, "must be 1 at real tokens .*, got nan"),
        ({"attention_mask": torch.full((2, 11), 2)}, "must be 1 at real tokens .*, got 2"),
        ({"attention_mask": torch.ones(2, 11), "cu_seqlens": torch.tensor([0, 11])}, "leave attention_mask out"),
        ({"output_attentions": True}, "output_attentions=True is not possible"),
        ({"inputs_embeds": torch.ones(2, 11, 32)}, "input_ids or inputs_embeds, one of them"),
        ({"token_type_ids": torch.ones(2, 11)}, "takes no 'token_type_ids'"),
        ({"position_ids": torch.arange(5)[None]}, r"\(batch or 1, tokens\) = \(2, 11\), got \(1, 5\)"),
        ({"input_ids": torch.arange(11)}, r"input_ids must be \(batch, tokens\), got \(11,\)"),
        ({"input_ids": None, "inputs_embeds": torch.ones(2, 11, 31)}, r"\(batch, tokens, 32\), got \(2, 11, 31\)"),
    ],
)
def test_bad_calls_are_named(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()(**{"input_ids": draw()} | options)


def test_a_config_that_asks_for_attention_weights_is_told_so_too():
    model = build(output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions=True is not possible"):
        model(draw())
    assert model(draw(), output_attentions=False).attentions is None


def test_packed_sequences_leave_no_cache():
    """Each has a length of its own, and the next token of each its own position: one length is wrong for all."""
    model, row, bounds = build(mechanism="softmax"), draw(1), torch.tensor([0, 4, 11])
    assert model(row, cu_seqlens=bounds).past_key_values is None
    for options in ({"use_cache": True}, {"past_key_values": prefilled(model, row)}):
        with pytest.raises(ValueError, match="cu_seqlens packs sequences of several lengths"):
            model(row, cu_seqlens=bounds, **options)
