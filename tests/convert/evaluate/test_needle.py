from random import Random

import pytest
import torch
from tests.convert.evaluate.tiny import Known, next_tokens, tiny_llama

from linattn.convert.convert import convert, plan_model
from linattn.convert.evaluate.needle import by_length, needles_found
from linattn.convert.evaluate.needle_text import Needle, make_needle, most_sentences, needle_texts


def encode(text):
    return list(text.encode())


def by_pairs(text):
    """A tokenizer that joins letters two by two, so that the end of the prompt depends on what follows."""
    data = text.encode()
    return [int.from_bytes(data[i : i + 2]) for i in range(0, len(data), 2)]


def found_at(model, length, **options):
    return needles_found(model, needle_texts(encode, length, **options), length)


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

    knows = found_at(Known(next_tokens(following)), 200, count=2, depths=(0.5,))[0]
    assert (knows.found, knows.tokens_right) == (1.0, 1.0)
    row = found_at(model, 200, count=1, depths=(0.5,), digits=2)[0]
    assert row.found == float(written[0, -made.answer :].tolist() == made.ids[-made.answer :])


def test_one_wrong_digit_is_not_found_and_nats_tell_it():
    def all_but_the_last(ids):
        return (torch.arange(ids.shape[1]) != ids.shape[1] - 2).expand_as(ids)

    row = found_at(Known(next_tokens(all_but_the_last)), 250, count=3, depths=(0.0,))[0]
    assert (row.found, row.tokens_right, row.count) == (0.0, pytest.approx(7 / 8), 3)
    assert row.nats == pytest.approx((10 + 0.011) / 8, rel=0.02)


def test_the_seed_decides_and_lengths_come_together():
    model = tiny_llama()
    rows, again, other = (
        [row for length in (200, 300) for row in found_at(model, length, count=1, depths=(0.0, 1.0), seed=seed)]
        for seed in (1, 1, 2)
    )
    assert rows == again
    assert rows != other
    assert [row["length"] for row in by_length(rows)] == [200, 300]
    with pytest.raises(ValueError, match="at least"):
        make_needle(encode, 40, 0.0, Random(0))


@pytest.mark.parametrize("method", [None, "still"])
def test_texts_of_different_lengths_at_once_are_what_each_is_alone(method):
    """Numbers of different lengths too: what fills up shorter texts is not seen, and not counted."""
    model = tiny_llama(seed=3)
    if method is not None:
        convert(model, plan_model(model, method, window=16, ratio=0.25, cap=8))
    texts = needle_texts(encode, 230, count=2, depths=(0.0, 1.0))
    texts.append(Needle(texts[0].ids[:170] + texts[1].ids[-9:-2], 3, 1.0))
    assert len({len(text.ids) for text in texts}) > 2
    alone, together = (needles_found(model, texts, 230, batch_tokens=tokens) for tokens in (1, 700))
    for one, other in zip(alone, together, strict=True):
        assert (one.depth, one.count, one.found, one.tokens_right) == (
            other.depth, other.count, other.found, other.tokens_right,
        )  # fmt: skip
        assert one.nats == pytest.approx(other.nats, abs=1e-4)
    whole = [needles_found(model, [text], 230)[0] for text in texts[2:]]  # those of depth 1
    tokens = [text.answer for text in texts[2:]]
    mean = sum(row.nats * count for row, count in zip(whole, tokens, strict=True)) / sum(tokens)
    assert together[1].nats == pytest.approx(mean, abs=1e-4)


@pytest.mark.parametrize("sizes", [(3, 5, 2, 9, 4), (1, 1, 30), (7,)])
def test_the_most_sentences_are_found_in_a_few_tries(sizes):
    tries = []

    def size(n):
        tries.append(n)
        return 11 + sum(sizes[i % len(sizes)] for i in range(n))

    for length in (11, 12, 40, 1000, 9001):
        tries.clear()
        found = most_sentences(size, length, sizes, length)
        assert len(tries) <= 12  # long texts take long to encode
        assert size(found) <= length < size(found + 1)
    with pytest.raises(ValueError, match="at least 11"):
        most_sentences(size, 10, sizes, 10)
