import re
from hashlib import blake2b
from itertools import pairwise
from random import Random

import pytest

from linattn.convert.evaluate.haystack import LONGEST, TEXT, Haystack, split_sentences, text_haystack
from linattn.convert.evaluate.needle_text import most_sentences, needle_texts
from linattn.support.options import OptionError

NEEDLE = re.compile(r"One of the special magic numbers for (\S+) is: (\d+)\. ")


def encode(text):
    return list(text.encode())


def by_pairs(text):
    data = text.encode()
    return [int.from_bytes(data[i : i + 2]) for i in range(0, len(data), 2)]


class Pieces:
    """Tokens of up to four letters with the space before them, as many tokenizers have them."""

    def __init__(self):
        self.calls = 0
        self.words = []
        self.numbers = {}

    def __call__(self, text):
        self.calls += 1
        found = []
        for word in re.findall(r" ?\w{1,4}|\W", text):
            if word not in self.numbers:
                self.numbers[word] = len(self.words)
                self.words.append(word)
            found.append(self.numbers[word])
        return found

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


@pytest.mark.parametrize(
    ("tokenizer", "expected"), [(encode, "b50667f7f4abeafd"), (by_pairs, "b18e3d361100ea62")], ids=["bytes", "pairs"]
)
def test_texts_of_noise_are_those_of_files_that_do_not_name_a_haystack(tokenizer, expected):
    made = [text for length in (230, 3000) for text in needle_texts(tokenizer, length, count=2, digits=5, seed=7)]
    assert {text.haystack for text in made} == {"noise"}
    found = repr([(text.ids, text.answer, text.depth) for text in made])
    assert blake2b(found.encode(), digest_size=8).hexdigest() == expected


@pytest.mark.parametrize("length", [400, 1500])
def test_a_needle_is_once_at_its_depth_in_text_as_it_was_written(length):
    tokenizer = Pieces()
    texts = articles()
    source = "".join(f"{text}\n\n" for text in texts)
    haystack = text_haystack(texts, tokenizer, length)
    made = needle_texts(tokenizer, length, count=4, digits=5, haystack=haystack)
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
    assert wrapped or length < 1000  # after the last text comes the first
    assert needle_texts(tokenizer, length, count=4, digits=5, haystack=haystack) == made
    assert needle_texts(tokenizer, length, count=4, digits=5, haystack=haystack, seed=1) != made


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
    with pytest.raises(OptionError, match=r"at least 2,000 tokens.*got 1,200.*--eval-text") as error:
        text_haystack(["a" * 700, "b" * 500], encode, 2000)
    assert error.value.option == "needle_haystacks"
    # Just long enough: all of it may be there, nothing twice.
    texts = articles(1, 40)
    size = len(texts[0])
    for text in needle_texts(encode, size, haystack=text_haystack(texts, encode, size)):
        numbers = re.findall(r"S\d+x\d+", bytes(text.ids).decode())
        assert len(numbers) == len(set(numbers)) > 30
    few = Haystack(TEXT, split_sentences("One. Two. Three."))
    for text in needle_texts(encode, 5000, haystack=few):
        assert all(bytes(text.ids).count(word) == 1 for word in (b"One. ", b"Two. ", b"Three.\n\n"))


@pytest.mark.parametrize("seed", range(3))
def test_the_most_sentences_of_any_sizes_are_found_in_a_few_tries(seed):
    """Also where characters tell little of tokens."""
    random = Random(seed)
    letters = [random.choice([2, 40, 150, 400]) for _ in range(3000)]
    tokens = [max(1, round(each / random.choice([1, 4, 6]))) for each in letters]
    before = [0]
    for each in tokens:
        before.append(before[-1] + each)
    assert all(a < b for a, b in pairwise(before))
    tries = []

    def size(n):
        tries.append(n)
        return 50 + before[n]

    for length in (50, 60, 300, 1024, 8192):
        tries.clear()
        found = most_sentences(size, length, letters, len(letters))
        assert len(tries) <= 16
        assert size(found) <= length < size(found + 1)
    assert most_sentences(size, 8192, letters, 7) == 7


def test_a_text_is_encoded_a_few_times():
    tokenizer = Pieces()
    haystack = text_haystack(articles(20, 150), tokenizer, 8192)
    tokenizer.calls = 0
    needle_texts(tokenizer, 8192, count=1, haystack=haystack)
    assert tokenizer.calls <= 5 * 9


def test_a_sudden_change_of_tokens_does_not_make_guesses_creep():
    tries = []

    def size(n):
        """Sentences of one token, then sentences of a hundred, all with as many characters."""
        tries.append(n)
        return 50 + min(n, 500) + 100 * max(n - 500, 0)

    assert most_sentences(size, 600, [100] * 1000, 1000) == 500
    assert len(tries) <= 18
