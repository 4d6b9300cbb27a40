"""Mano: how well a model uses what it knows, by arithmetic without written steps (Physics of Language Models 4.1)."""

from dataclasses import dataclass

import numpy as np

from linattn.lab.tasks.synthetic.mano_expressions import OPERATIONS, random_expressions, values
from linattn.lab.tasks.synthetic.packed import PackedTask, Stream
from linattn.lab.tasks.text.checks import at_least


@dataclass(frozen=True, kw_only=True)
class Mano(PackedTask):
    """``bos [l] * + 3 11 7 [answer l] 6``: an expression of l operations in prefix notation, and its value mod 23.

    In training l is uniform in ``1 .. operations``; in a test it is ``operations``. The loss is on all tokens in
    training, and only on the value in a test, where ``accuracy`` counts it. ``bos``, operations, lengths and marks
    have two tokens each that mean the same, one of which is chosen at random.

    Args:
        operations: L, the largest l.
        modulus: modulus of the arithmetic.
        synonyms: False: use only one token for each.
        length: tokens of a window, which holds several instances.

    Example:
        >>> task = Mano(operations=2, synonyms=False, length=12)
        >>> task.batch(0, 1).inputs.shape, task.vocabulary
        (torch.Size([1, 12]), 39)
    """

    name = "mano"
    operations: int = 10
    modulus: int = 23
    synonyms: bool = True
    length: int = 1024
    test_examples: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("operations", self.operations, 1)
        at_least("modulus", self.modulus, 2)
        self.check_length()

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
        found = random_expressions(rng, sizes, self.modulus)
        results = values(found, self.modulus)
        other = (rng.random((number, 2 * most + 5)) < 0.5) & self.synonyms
        rows = np.zeros((number, 2 * most + 5), np.int64)
        places = np.arange(2 * most + 1)
        rows[:, 0] = self.first_mark + other[:, 0]
        rows[:, 1] = self.first_mark + 2 * sizes + other[:, 1]
        operation = self.modulus + found.codes + len(OPERATIONS) * other[:, 2:-2]
        rows[:, 2:-2] = np.where(found.operation, operation, found.codes)
        every, end = np.arange(number), 2 * sizes + 3
        rows[every, end] = self.first_answer + 2 * (sizes - 1) + other[every, end]
        rows[every, end + 1] = results
        real = np.concatenate([np.ones((number, 4), np.bool_), places < 2 * sizes[:, None] + 1], 1)
        asked = np.full_like(real, train)
        asked[every, end + 1] = True
        spans = 2 * sizes + 5
        return Stream(rows[real], asked[real], np.cumsum(spans) - spans)
