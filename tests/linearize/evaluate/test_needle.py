from random import Random

import pytest
import torch
from tests.linearize.evaluate.tiny import Known, next_tokens, tiny_llama

from linattn.linearize.evaluate.needle import by_length, make_needle, needle


def encode(text):
    return list(text.encode())


def by_pairs(text):
    """A tokenizer that joins letters two by two, so that the end of the prompt depends on what follows."""
    data = text.encode()
    return [int.from_bytes(data[i : i + 2]) for i in range(0, len(data), 2)]


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_text_has_its_length_its_needle_at_its_depth_and_its_answer_at_the_end(depth):
    made = make_needle(encode, 600, depth, Random(1), digits=5)
    text = bytes(made.ids).decode()
    assert 600 - len("There and back again. ") < len(made.ids) <= 600
    needle_at, question_at = text.index("One of the special"), text.index("The special magic")
    number = text[-5:]
    assert number.isdigit()
    assert made.answer == len(" 12345")
    assert text.count(number) == 2
    assert text[:-5].endswith("is: ")
    filler = question_at - len("One of the special magic numbers for calm-harbor is: 12345. ")
    assert needle_at / filler == pytest.approx(depth, abs=0.06)


def test_a_tokenizer_that_joins_prompt_and_answer_still_hides_the_whole_number():
    for seed in range(6):
        made = make_needle(by_pairs, 150, 0.5, Random(seed))
        text = b"".join(i.to_bytes(2) for i in made.ids).replace(b"\0", b"").decode()
        hidden = text[-2 * made.answer :]
        assert sum(letter.isdigit() for letter in hidden) >= 7


def test_what_a_greedy_decoder_writes_is_what_counts():
    model = tiny_llama(seed=3)
    made = make_needle(encode, 200, 0.5, Random(5), digits=2)
    prompt = torch.tensor([made.ids[: -made.answer]])
    written = model.generate(prompt, max_new_tokens=made.answer, do_sample=False, pad_token_id=0, eos_token_id=None)

    def following(ids):
        return torch.ones_like(ids, dtype=torch.bool)

    knows = needle(Known(next_tokens(following)), encode, [200], count=2, depths=(0.5,))[0]
    assert (knows.found, knows.tokens_right) == (1.0, 1.0)
    row = needle(model, encode, [200], count=1, depths=(0.5,), digits=2)[0]
    assert row.found == float(written[0, -made.answer :].tolist() == made.ids[-made.answer :])


def test_one_wrong_digit_is_not_found_and_nats_tell_it():
    def all_but_the_last(ids):
        return (torch.arange(ids.shape[1]) != ids.shape[1] - 2).expand_as(ids)

    row = needle(Known(next_tokens(all_but_the_last)), encode, [250], count=3, depths=(0.0,))[0]
    assert (row.found, row.tokens_right, row.count) == (0.0, pytest.approx(7 / 8), 3)
    assert row.nats == pytest.approx((10 + 0.011) / 8, rel=0.02)


def test_the_seed_decides_and_lengths_come_together():
    model = tiny_llama()
    rows = needle(model, encode, [200, 300], count=1, depths=(0.0, 1.0), seed=1)
    assert rows == needle(model, encode, [200, 300], count=1, depths=(0.0, 1.0), seed=1)
    assert rows != needle(model, encode, [200, 300], count=1, depths=(0.0, 1.0), seed=2)
    assert [row["length"] for row in by_length(rows)] == [200, 300]
    with pytest.raises(ValueError, match="at least"):
        make_needle(encode, 40, 0.0, Random(0))
