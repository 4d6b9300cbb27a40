"""Mano: how well a model uses what it knows, by arithmetic without written steps (Physics of Language Models 4.1)."""

from dataclasses import dataclass

import numpy as np

from linattn.lab.tasks.synthetic.packed import Flags, Ints, PackedTask, Stream, below
from linattn.support.config import option

OPERATIONS = ("+", "-", "*")


@dataclass(frozen=True, kw_only=True)
class Mano(PackedTask):
    """``bos [l] * + 3 11 7 [answer l] 6``: an expression of l operations in prefix notation, and its value mod 23.

    In training l is uniform in ``1 .. operations``; in a test it is ``operations``. The loss is on all tokens in
    training, and only on the value in a test, where ``accuracy`` counts it. ``bos``, operations, lengths and marks
    have two tokens each that mean the same, one of which is chosen at random.
    """

    name = "mano"
    operations: int = option(10, "L, the largest l.", least=1)
    modulus: int = option(23, "Modulus of the arithmetic.", least=2)
    synonyms: bool = option(True, "False: only one token for each.")
    length: int = option(1024, "Tokens of a window, which holds several instances.")
    test_examples: int = option(256, "Test sequences.", least=1)

    @property
    def vocabulary(self) -> int:
        """Number of tokens: values, 2 x 3 operations, 2 ``bos``, and for each l 2 of the length and 2 of the answer."""
        return self.first_answer + 2 * self.operations

    @property
    def first_mark(self) -> int:
        """The first ``bos``; the tokens of lengths come after the second."""
        return self.modulus + 2 * len(OPERATIONS)

    @property
    def first_answer(self) -> int:
        return self.first_mark + 2 + 2 * self.operations

    def typical(self, train: bool) -> float:
        return 5 + 2 * ((self.operations + 1) / 2 if train else self.operations)

    def instances(self, rng: np.random.Generator, number: int, train: bool) -> Stream:
        most = self.operations
        sizes = rng.integers(1, most + 1, number) if train else np.full(number, most)
        operation, codes = random_expressions(rng, sizes, self.modulus)
        other = (rng.random((number, 2 * most + 5)) < 0.5) & self.synonyms
        rows = np.zeros((number, 2 * most + 5), np.int64)
        rows[:, 0] = self.first_mark + other[:, 0]
        rows[:, 1] = self.first_mark + 2 * sizes + other[:, 1]
        rows[:, 2:-2] = codes + operation * (self.modulus + len(OPERATIONS) * other[:, 2:-2])
        every, end = np.arange(number), 2 * sizes + 3
        rows[every, end] = self.first_answer + 2 * (sizes - 1) + other[every, end]
        rows[every, end + 1] = values(sizes, operation, codes, self.modulus)
        real = np.arange(2 * most + 5) < 2 * sizes[:, None] + 5
        asked = np.full_like(real, train)
        asked[every, end + 1] = True
        spans = 2 * sizes + 5
        return Stream(rows[real], asked[real], np.cumsum(spans) - spans)


def random_expressions(rng: np.random.Generator, sizes: Ints, modulus: int) -> tuple[Flags, Ints]:
    """Draw expressions in prefix notation: ``(M, 2 L + 1)``, whether a place holds an operation, and its index in
    ``OPERATIONS`` or the number; that of ``sizes[m]`` operations fills the first ``2 sizes[m] + 1`` places.

    One of l operations is an operation, a left part with ``U{0 .. l - 1}`` of the others, and a right part with the
    rest; one without operations is a number.
    """
    number, most = len(sizes), int(sizes.max())
    order = np.argsort(-sizes, kind="stable")  # so that expressions that still grow come first
    places = 2 * most + 1
    waiting, top = np.zeros((number, most + 2), np.int64), np.zeros(number, np.int64)
    waiting[:, 0] = sizes[order]
    operation = np.zeros((number, places), np.bool_)
    share = rng.random((places, number))
    for place in range(places):
        rows = np.nonzero(place < 2 * sizes[order] + 1)[0]
        level = top[rows]
        size = waiting[rows, level]
        inner = size > 0
        left = (share[place, rows] * size).astype(np.int64)
        waiting[rows, level] = size - 1 - left  # a number pops the stack; what remains there is never read
        waiting[rows, level + 1] = left
        operation[order[rows], place] = inner
        top[rows] += 2 * inner - 1
    kinds = np.where(operation, len(OPERATIONS), modulus).ravel()
    return operation, below(rng, kinds).reshape(number, places)


def values(sizes: Ints, operation: Flags, codes: Ints, modulus: int) -> Ints:
    """The value of each expression, read from its end: numbers go on a stack, an operation takes two from it."""
    number, places = codes.shape
    stack, top = np.zeros((number, places // 2 + 3), np.int64), np.zeros(number, np.int64)
    for place in reversed(range(places)):
        rows = np.nonzero(place < 2 * sizes + 1)[0]
        inner, code, level = operation[rows, place], codes[rows, place], top[rows]
        left, right = stack[rows, level - 1], stack[rows, level - 2]
        result = np.choose(code % len(OPERATIONS), (left + right, left - right, left * right)) % modulus
        stack[rows, level - 2 * inner] = np.where(inner, result, code)
        top[rows] += 1 - 2 * inner
    return stack[:, 0]
