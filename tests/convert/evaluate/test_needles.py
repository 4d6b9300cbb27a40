"""Needles in noise and in text: how they are made, and what of them is found."""

import re
from hashlib import blake2b
from random import Random

import pytest
import torch
from tests.convert.evaluate.tiny import Known, next_tokens, tiny_llama

from linattn.convert.convert import convert, plan_model
from linattn.convert.evaluate.needles import (
    LONGEST,
    TEXT,
    Haystack,
    Needle,
    make_needle,
    needle_texts,
    needles_found,
    split_sentences,
    text_haystack,
)

NEEDLE = re.compile(r"One of the special magic numbers for (\S+) is: (\d+)\. ")


def encode(text):
    return list(text.encode())


def by_pairs(text):
    """A tokenizer that joins letters two by two, so that the end of the prompt depends on what follows."""
    data = text.encode()
    return [int.from_bytes(data[i : i + 2]) for i in range(0, len(data), 2)]


class Pieces:
    """Tokens of up to four letters with the space before them, as many tokenizers have them."""

    def __init__(self):
        self.words, self.numbers = [], {}

    def __call__(self, text):
        ids = []
        for word in re.findall(r" ?\w{1,4}|\W", text):
            if word not in self.numbers:
                self.numbers[word] = len(self.words)
                self.words.append(word)
            ids.append(self.numbers[word])
        return ids

    def decode(self, ids):
        return "".join(self.words[i] for i in ids)


def articles(count=4, sentences=60):
    """Each sentence has a number of its own; one article has short ones, the next long ones."""
    random = Random(0)
    made = []
    for article in range(count):
        sizes = (15, 30) if article % 2 else (2, 8)
        lines = []
        for i in range(sentences):
            words = random.choices(["river", "stone", "lamp"], k=random.randint(*sizes))
            lines.append(f"S{article}x{i} {' '.join(words)}." + random.choice((" ", " ", "\n\n")))
        made.append("".join(lines).strip())
    return made


def found_at(model, length, **options):
    return needles_found(model, needle_texts(encode, length, **options), length)


@pytest.mark.parametrize(
    ("tokenizer", "expected"), [(encode, "b50667f7f4abeafd"), (by_pairs, "b18e3d361100ea62")], ids=["bytes", "pairs"]
)
def test_texts_of_noise_stay_those_of_published_results(tokenizer, expected):
    made = [text for length in (230, 3000) for text in needle_texts(tokenizer, length, count=2, seed=7)]
    assert {text.haystack for text in made} == {"noise"}
    found = repr([(text.ids, text.answer, text.depth) for text in made])
    assert blake2b(found.encode(), digest_size=8).hexdigest() == expected


def test_a_needle_is_once_at_its_depth_in_text_as_it_was_written():
    tokenizer, length = Pieces(), 1500
    texts = articles()
    source = "".join(f"{text}\n\n" for text in texts)
    haystack = text_haystack(texts, tokenizer, length)
    made = needle_texts(tokenizer, length, count=4, haystack=haystack)
    order = re.findall(r"S\d+x\d+", source)
    largest = max(len(tokenizer(sentence)) for sentence in haystack.sentences)
    begun, wrapped = set(), 0
    for each in made:
        text = tokenizer.decode(each.ids)
        (needle,) = NEEDLE.finditer(text)
        key, number = needle.groups()
        question = f"The special magic number for {key} mentioned in the provided text is: {number}"
        assert text.endswith(question)
        assert tokenizer.decode(each.ids[-each.answer :]).strip() == number
        before, after = text[: needle.start()], text[needle.end() : -len(question)]
        whole = before + after
        assert whole in source + source
        wrapped += whole not in source
        assert before == "" or before.rstrip().endswith(".")
        numbers = re.findall(r"S\d+x\d+", whole)
        assert len(numbers) == len(set(numbers))
        # The next sentence of the source would not have fitted; whole sentences only.
        following = haystack.sentences[(order.index(numbers[-1]) + 1) % len(order)]
        assert length - len(tokenizer(following)) <= len(each.ids) <= length
        # At the nearest boundary, at most half of the longest sentence away; characters tell tokens to a hundredth.
        off = len(tokenizer(before)) - each.depth * len(tokenizer(whole))
        assert abs(off) <= 0.5 * largest + 0.01 * length
        assert each.haystack == TEXT
        begun.add(numbers[0])
    assert len(begun) > 10
    assert wrapped  # after the last text comes the first
    assert needle_texts(tokenizer, length, count=4, haystack=haystack) == made
    assert needle_texts(tokenizer, length, count=4, haystack=haystack, seed=1) != made


def test_ends_of_sentences_and_pieces_without_any():
    text = 'He said "Stop!"  Then: "Why?" 3.14 is no end.\nA heading\n\nLast one'
    assert split_sentences(text) == [
        'He said "Stop!"  ', 'Then: "Why?" ', "3.14 is no end.\n", "A heading\n\n", "Last one\n\n",
    ]  # fmt: skip
    for long in ("word " * 500, "字" * 3000, " \n" + "x" * LONGEST + ". Yes. \n"):
        pieces = split_sentences(long)
        assert "".join(pieces) == long.strip() + "\n\n"
        assert all(piece.strip() and len(piece.rstrip()) <= LONGEST for piece in pieces)
        assert len(pieces) <= len(long) / LONGEST * 1.1 + 2
    assert split_sentences(" \n ") == []


def test_texts_that_are_too_short_are_told_with_what_is_needed():
    with pytest.raises(ValueError, match="at least"):
        make_needle(encode, 40, 0.0, Random(0))
    # Just long enough: all of it may be there, nothing twice.
    texts = articles(1, 40)
    size = len(texts[0])
    for text in needle_texts(encode, size, haystack=text_haystack(texts, encode, size)):
        numbers = re.findall(r"S\d+x\d+", bytes(text.ids).decode())
        assert len(numbers) == len(set(numbers)) > 30
    few = Haystack(TEXT, split_sentences("One. Two. Three."))
    for text in needle_texts(encode, 5000, haystack=few):
        assert all(bytes(text.ids).count(word) == 1 for word in (b"One. ", b"Two. ", b"Three.\n\n"))


def test_what_a_greedy_decoder_writes_is_what_counts():
    model = tiny_llama(seed=3)
    made = make_needle(encode, 200, 0.5, Random(5))
    prompt = torch.tensor([made.ids[: -made.answer]])
    written = model.generate(prompt, max_new_tokens=made.answer, do_sample=False, pad_token_id=0, eos_token_id=None)
    everything = Known(next_tokens(lambda ids: torch.ones_like(ids, dtype=torch.bool)))
    knows = found_at(everything, 200, count=2, depths=(0.5,))[0]
    assert (knows["found"], knows["tokens_right"]) == (1.0, 1.0)
    row = found_at(model, 200, count=1, depths=(0.5,))[0]
    assert row["found"] == float(written[0, -made.answer :].tolist() == made.ids[-made.answer :])


def test_one_wrong_digit_is_not_found_and_nats_tell_it():
    def all_but_the_last(ids):
        return (torch.arange(ids.shape[1]) != ids.shape[1] - 2).expand_as(ids)

    row = found_at(Known(next_tokens(all_but_the_last)), 250, count=3, depths=(0.0,))[0]
    assert (row["found"], row["tokens_right"], row["count"]) == (0.0, pytest.approx(5 / 6), 3)
    assert row["nats"] == pytest.approx((10 + 0.011) / 6, rel=0.02)


@pytest.mark.parametrize("method", [None, "still"])
def test_texts_of_different_lengths_at_once_are_what_each_is_alone(method):
    """Numbers of different lengths too: what fills up shorter texts is not seen, and not counted."""
    model = tiny_llama(seed=3)
    if method is not None:
        convert(model, plan_model(model, method, window=16, ratio=0.25, cap=8))
    texts = needle_texts(encode, 230, count=2, depths=(0.0, 1.0))
    texts.append(Needle(texts[0].ids[:170] + texts[1].ids[-7:-2], 3, 1.0))
    assert len({len(text.ids) for text in texts}) > 2
    alone, together = (needles_found(model, texts, 230, batch_tokens=tokens) for tokens in (1, 700))
    for one, other in zip(alone, together, strict=True):
        assert one == other | {"nats": pytest.approx(other["nats"], abs=1e-4)}
    whole = [needles_found(model, [text], 230)[0] for text in texts[2:]]  # those of depth 1
    tokens = [text.answer for text in texts[2:]]
    mean = sum(row["nats"] * count for row, count in zip(whole, tokens, strict=True)) / sum(tokens)
    assert together[1]["nats"] == pytest.approx(mean, abs=1e-4)
