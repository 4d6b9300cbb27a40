"""A parser that tells how likely a sentence of a grammar is, and what may follow each of its prefixes."""

from collections.abc import Sequence
from math import log

import numpy as np

from linattn.lab.tasks.synthetic.lano_grammars import TERMINALS, Rules, lengths
from linattn.lab.tasks.synthetic.ragged import Floats

SCALE = 1.7  # factor for each token that keeps products of many chances near 1; divided out at the end


class Parser:
    """Sums over all derivations from ``root``, each rule of a symbol being equally likely.

    The entry ``[i, d]`` of a chart is for the d tokens from place i on, d at most the longest that the symbol derives.
    """

    def __init__(self, rules: Rules, root: int) -> None:
        self.rules, self.root = rules, root
        self.order = [symbol for symbol in sorted(rules) if symbol <= root]  # parts before their symbols
        self.widest = {symbol: found.longest for symbol, found in lengths(rules).items()}

    def accepts(self, sentence: Sequence[int]) -> bool:
        return self.log_chance(sentence) > -np.inf

    def log_chance(self, sentence: Sequence[int]) -> float:
        """Logarithm of the chance of the whole sentence; ``-inf`` if the grammar does not have it."""
        size = len(sentence)
        chart = self._inside(sentence)[self.root]
        chance = chart[0, size] if 0 < size < chart.shape[1] else 0.0
        return float(np.log(chance)) - size * log(SCALE) if chance > 0 else -np.inf

    def next_chances(self, sentence: Sequence[int]) -> Floats:
        """Chances ``(T + 1, 4)`` of the end and of the tokens 1, 2 and 3, after each prefix of the sentence.

        They are zero after a prefix that no sentence begins with.
        """
        inside, size = self._inside(sentence), len(sentence)
        # ahead[a][i, d, x]: chance that symbol a derives the d tokens from place i on, then x, then anything.
        ahead: dict[int, Floats] = {}
        for token in range(1, TERMINALS + 1):
            ahead[token] = np.zeros((size + 1, 1, TERMINALS))
            ahead[token][:, 0, token - 1] = 1
        for symbol in self.order:
            found = np.zeros((size + 1, min(self.widest[symbol], size + 1), TERMINALS))
            for rule in self.rules[symbol]:
                before: Floats | None = None
                for part in rule:
                    reached = ahead[part] if before is None else joined(before, ahead[part])
                    width = min(reached.shape[1], found.shape[1])
                    found[:, :width] += reached[:, :width]
                    before = inside[part] if before is None else joined(before, inside[part])
            ahead[symbol] = found / len(self.rules[symbol])
        chances = np.zeros((size + 1, 1 + TERMINALS))
        whole, more = inside[self.root][0], ahead[self.root][0]
        width = min(len(whole), size + 1)
        chances[:width, 0] = whole[:width]
        chances[: len(more), 1:] = more[: size + 1]
        return chances / np.maximum(chances.sum(1, keepdims=True), 1e-300)

    def _inside(self, sentence: Sequence[int]) -> dict[int, Floats]:
        """``[a][i, d]``: the chance that symbol a derives the d tokens from place i on."""
        size, tokens = len(sentence), np.asarray(sentence, np.int64)
        charts: dict[int, Floats] = {}
        for token in range(1, TERMINALS + 1):
            charts[token] = np.zeros((size + 1, 2))
            charts[token][:size, 1] = SCALE * (tokens == token)
        for symbol in self.order:
            found = np.zeros((size + 1, min(self.widest[symbol], size) + 1))
            for rule in self.rules[symbol]:
                whole = charts[rule[0]]
                for part in rule[1:]:
                    whole = joined(whole, charts[part])
                width = min(whole.shape[1], found.shape[1])
                found[:, :width] += whole[:, :width]
            charts[symbol] = found / len(self.rules[symbol])
        return charts


def joined(first: Floats, then: Floats) -> Floats:
    """``out[i, d] = sum_e first[i, e] then[i + e, d - e]``: one part after the other; ``then`` may have more axes."""
    size = len(first)
    out = np.zeros((size, min(first.shape[1] + then.shape[1] - 1, size + 1), *then.shape[2:]))
    for taken in np.nonzero(first.any(0))[0]:
        rows = np.nonzero(first[:, taken])[0]  # few: at most places most symbols derive nothing
        width = min(then.shape[1], out.shape[1] - taken)
        weight = first[rows, taken].reshape(len(rows), *[1] * (then.ndim - 1))
        out[rows, taken : taken + width] += weight * then[rows + taken, :width]
    return out
