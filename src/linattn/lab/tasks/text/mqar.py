"""Multi-query associative recall (Zoology, arXiv:2312.04927): many look-ups in one sequence."""

from dataclasses import dataclass

import torch

from linattn.lab.tasks.text.batch import IGNORED, Sequences
from linattn.lab.tasks.text.checks import at_least, require
from linattn.lab.tasks.text.draws import choose, distinct
from linattn.lab.tasks.text.generated import GeneratedTask


@dataclass(frozen=True, kw_only=True)
class Mqar(GeneratedTask):
    """``k_1 v_1 ... k_D v_D``, then every key once more among filler; the target at each repeated key is its value.

    Keys are ``1 .. vocab/2 - 1``, values ``vocab/2 .. vocab - 1``, both without repetition in a sequence; filler is 0.
    Key number i is repeated at place ``2 D + 2 g_i``. The gaps ``g`` are drawn without repetition from
    ``0 .. (T - 2 D)/2 - 1`` with ``p(g) ~ (g + 1)^(power - 1)``: with a small power, keys are repeated early.

    Args:
        vocab: number of tokens.
        length: T.
        pairs: D.
        power: the power in the distribution of gaps.
        random_filler: random tokens in place of 0, which are harder to tell from queries.

    Example:
        >>> batch = Mqar(vocab=12, length=8, pairs=2).batch(0, 1)
        >>> batch.inputs.tolist(), batch.targets.tolist()
        ([[2, 11, 1, 10, 2, 0, 1, 0]], [[-100, -100, -100, -100, 11, -100, 10, -100]])
    """

    name = "mqar"
    kind = "causal"
    vocab: int = 8192
    length: int = 64
    pairs: int = 4
    power: float = 0.01
    random_filler: bool = False
    test_examples: int = 3000

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("pairs", self.pairs, 1)
        require("length", self.length % 2 == 0, "even", self.length)
        allowed = f"at least 4 x pairs = {4 * self.pairs}, room for every key twice"
        require("length", self.length >= 4 * self.pairs, allowed, self.length)
        low = 2 * self.pairs + 2
        require("vocab", self.vocab % 2 == 0 and self.vocab >= low, f"even and at least {low}", self.vocab)
        require("power", 0 < self.power < float("inf"), "above 0 and finite", self.power)

    @property
    def vocabulary(self) -> int:
        return self.vocab

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        half, written = self.vocab // 2, 2 * self.pairs
        keys = 1 + choose(generator, count, half - 1, self.pairs)
        values = half + choose(generator, count, half, self.pairs)
        gaps = torch.arange(1, (self.length - written) // 2 + 1).double() ** (self.power - 1)
        places = written + 2 * distinct(generator, count, gaps, self.pairs)
        if self.random_filler:
            inputs = torch.randint(self.vocab, (count, self.length), generator=generator)
        else:
            inputs = torch.zeros(count, self.length, dtype=torch.int64)
        inputs[:, :written] = torch.stack([keys, values], 2).flatten(1)
        targets = torch.full_like(inputs, IGNORED)
        inputs.scatter_(1, places, keys)
        targets.scatter_(1, places, values)
        return Sequences(inputs, targets)
