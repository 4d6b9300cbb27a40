"""Lano: how well a model finds structure, by sentences of a context-free grammar (Physics of Language Models 4.1).

The grammars, the task, and a parser that tells how likely a sentence is and what may follow each of its prefixes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce

import numpy as np
import torch

from linattn.lab.tasks.synthetic.packed import Floats, Ints, PackedTask, Stream, below, groups
from linattn.lab.tasks.text.task import Sequences, once
from linattn.support.config import option
from linattn.support.options import check_option

TERMINALS = 3
# The rules of each symbol; all symbols of a rule are of the level below.
RULES = {
    "cfg3f": "22->20 21|20 19 21|21 19 19|20 20; 19->18 16 18|17 18|18 18; 20->16 16|16 17|17 16 18; "
    "21->18 17|17 16|16 17 18|16 18; 16->15 15|13 15 13|14 13|14 14; 17->15 14 13|14 15|15 14; "
    "18->14 15 13|15 13 13|13 15; 13->11 12|12 11 12|10 12 11; 14->10 12|12 10 12|12 11|10 12 12; "
    "15->10 11 11|11 11 10|10 10|12 12 11; 10->8 9 9|9 7 9|7 9 9; 11->8 8|9 7|9 7 7; 12->7 9 7|9 8|8 8 9; "
    "7->2 2 1|3 2 2|3 1 2|3 2; 8->3 1 1|1 2|3 3 1; 9->1 2 1|3 3|1 1",
    "cfg3j": "25->22 22|23 22|24 23 24; 22->19 20|19 19 21|20 19 19; 23->21 19 20|21 20|19 20 20; "
    "24->19 19|20 21 19|19 21 21; 19->17 17 16|16 18 18|16 17; 20->17 17 17|18 18|18 17 18; "
    "21->18 16|16 17 17|16 18 16; 16->14 15|13 15|15 15; 17->14 14|15 15 15|15 14; "
    "18->14 13 15|13 13 14|13 14; 13->10 12|12 10|11 11; 14->10 11|12 11 10|10 11 11; "
    "15->11 12 12|10 10|11 12; 10->7 7 9|8 7|9 8; 11->7 8 8|9 9|8 8; 12->7 7 8|8 7 7|9 8 8; "
    "7->1 2|2 2|3 3 2; 8->3 1|2 3|1 1 2; 9->3 2 1|1 3|3 2",
    "cfg3k": "25->22 23|24 24|24 23; 22->21 19|21 20 20|21 21|19 21; 23->20 21 20|20 21 21|20 20|19 20; "
    "24->21 20|20 21|19 19 21; 19->17 18 16|18 16|18 16 18|18 18 17; 20->17 17 17|16 18|17 17 16|18 17 16; "
    "21->18 17|16 18 16|17 16 16|17 18 18; 16->15 14|14 15|15 14 15|14 13 13; 17->14 15 14|15 13 13|15 15; "
    "18->14 14|15 13|13 14 14; 13->10 12 12|11 11 12|12 12; 14->10 11|10 11 11|11 10 10|11 11; "
    "15->12 11|10 10|11 12; 10->7 7|8 8|9 9 7|7 9 7; 11->8 7 9|7 7 7|7 8 7; 12->7 8|8 8 7|9 7 9|8 9; "
    "7->3 3|1 3 1|2 1; 8->2 3|1 1 2|3 1|1 2 2; 9->1 3 3|2 2|1 1 1|3 2 3",
}
SCALE = 1.7  # factor for each token that keeps products of many chances near 1; ratios of chances are without it
Rules = dict[int, list[list[int]]]


@cache
def grammar(name: str) -> Rules:
    """The rules of each symbol of the grammar ``name``.

    Example:
        >>> grammar("cfg3f")[9]
        [[1, 2, 1], [3, 3], [1, 1]]
    """
    found: Rules = {}
    for line in RULES[name].split("; "):
        symbol, rules = line.split("->")
        found[int(symbol)] = [[int(part) for part in rule.split()] for rule in rules.split("|")]
    return found


def lengths(rules: Rules, of_rules: Callable[[list[float]], float]) -> dict[int, float]:
    """For each symbol the number of terminals it derives: ``of_rules`` is the mean or the maximum over its rules.

    Example:
        >>> lengths(grammar("cfg3f"), max)[9]
        3
    """
    found: dict[int, float] = dict.fromkeys(range(1, TERMINALS + 1), 1)
    for symbol in sorted(rules):  # the parts of a symbol have lower numbers
        found[symbol] = of_rules([sum(found[part] for part in rule) for rule in rules[symbol]])
    return found


def random_sentences(rng: np.random.Generator, name: str, root: int, number: int) -> tuple[Ints, Ints]:
    """Terminals of ``number`` random sentences end to end, and the number of the sentence that each belongs to."""
    counts, sizes, parts = _tables(name)
    symbols, of = np.full(number, root), np.arange(number)
    while symbols[0] > TERMINALS:
        rule = below(rng, counts[symbols])
        members = groups(sizes[symbols, rule])
        symbols = parts[symbols[members.of], rule[members.of], members.inner]
        of = of[members.of]
    return symbols, of


@cache
def _tables(name: str) -> tuple[Ints, Ints, Ints]:
    """The number of rules of each symbol; the number of parts of each rule, and the parts."""
    rules = grammar(name)
    most = max(map(len, rules.values()))
    counts = np.zeros(max(rules) + 1, np.int64)
    sizes, parts = np.zeros((len(counts), most), np.int64), np.zeros((len(counts), most, 3), np.int64)
    for symbol, found in rules.items():
        counts[symbol] = len(found)
        for number, rule in enumerate(found):
            sizes[symbol, number], parts[symbol, number, : len(rule)] = len(rule), rule
    return counts, sizes, parts


class Parser:
    """Sums over all derivations from ``root``, each rule of a symbol being equally likely.

    The entry ``[i, d]`` of a chart is for the d tokens from place i on, d at most the longest that the symbol derives.
    """

    def __init__(self, rules: Rules, root: int) -> None:
        self.rules, self.root = rules, root
        self.order = [symbol for symbol in sorted(rules) if symbol <= root]  # parts before their symbols
        self.widest = {symbol: int(longest) for symbol, longest in lengths(rules, max).items()}

    def accepts(self, sentence: Sequence[int]) -> bool:
        """Whether the whole sentence can be derived."""
        chart = self._inside(sentence)[self.root]
        return 0 < len(sentence) < chart.shape[1] and bool(chart[0, len(sentence)] > 0)

    def next_chances(self, sentence: Sequence[int]) -> Floats:
        """Chances ``(T + 1, 4)`` of the end and of the tokens 1, 2 and 3, after each prefix of the sentence.

        They are zero after a prefix that no sentence begins with.
        """
        inside, size = self._inside(sentence), len(sentence)
        # ahead[a][i, d, x]: chance that symbol a derives the d tokens from place i on, then x, then anything.
        terminals = np.zeros((TERMINALS, size + 1, 1, TERMINALS))
        for token in range(TERMINALS):
            terminals[token, :, 0, token] = 1
        ahead = dict(enumerate(terminals, 1))
        for symbol in self.order:
            found = np.zeros((size + 1, min(self.widest[symbol], size + 1), TERMINALS))
            for first, *others in self.rules[symbol]:
                _add(found, ahead[first])
                before = inside[first]
                for part in others:
                    _add(found, joined(before, ahead[part]))
                    before = joined(before, inside[part])
            ahead[symbol] = found / len(self.rules[symbol])
        chances = np.zeros((size + 1, 1 + TERMINALS))
        whole, more = inside[self.root][0], ahead[self.root][0]
        chances[: len(whole), 0] = whole
        chances[: len(more), 1:] = more
        return chances / np.maximum(chances.sum(1, keepdims=True), 1e-300)

    def _inside(self, sentence: Sequence[int]) -> dict[int, Floats]:
        """``[a][i, d]``: the chance that symbol a derives the d tokens from place i on."""
        size, tokens = len(sentence), np.asarray(sentence, np.int64)
        charts = {token: np.zeros((size + 1, 2)) for token in range(1, TERMINALS + 1)}
        for token, chart in charts.items():
            chart[:size, 1] = SCALE * (tokens == token)
        for symbol in self.order:
            found = np.zeros((size + 1, min(self.widest[symbol], size) + 1))
            for rule in self.rules[symbol]:
                _add(found, reduce(joined, (charts[part] for part in rule)))
            charts[symbol] = found / len(self.rules[symbol])
        return charts


def _add(chart: Floats, other: Floats) -> None:
    """Add what fits of ``other`` to ``chart``."""
    width = min(chart.shape[1], other.shape[1])
    chart[:, :width] += other[:, :width]


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


@dataclass(frozen=True, kw_only=True)
class Lano(PackedTask):
    """``bos 3 1 2 ... bos 1 1 ...``: random sentences of a grammar, each rule of a symbol being equally likely.

    The loss is on all tokens. In a test the true distribution of every next token is known: ``kl`` is the divergence of
    the model from it in nats per token, and ``legal`` counts predictions with which some sentence continues.

    Example:
        >>> task = Lano(root=9, length=8)
        >>> task.valid([1, 2, 1]), task.valid([1, 2])
        (True, False)
    """

    name = "lano"
    metric = "kl"
    higher_is_better = False
    vocabulary = 1 + TERMINALS  # and bos, which is 0
    grammar: str = option("cfg3f", "Which grammar.", choices=RULES)
    root: int | None = option(
        None, "The symbol that sentences derive from; a lower one gives shorter sentences.",
        default_text="that of the paper",
    )  # fmt: skip
    length: int = option(512, "Tokens of a window, which holds several sentences.")
    test_examples: int = option(64, "Test sequences.", least=1)

    def check(self) -> None:
        if self.root is not None:
            check_option("root", self.root, sorted(grammar(self.grammar)))
        super().check()

    @property
    def top(self) -> int:
        return max(grammar(self.grammar)) if self.root is None else self.root

    @once
    def parser(self) -> Parser:
        return Parser(grammar(self.grammar), self.top)

    def valid(self, sentence: list[int]) -> bool:
        """Whether the grammar has this sentence, the tokens between two ``bos``."""
        return bool(sentence) and all(1 <= token <= TERMINALS for token in sentence) and self.parser.accepts(sentence)

    def typical(self, train: bool) -> float:
        return 1 + lengths(grammar(self.grammar), lambda found: sum(found) / len(found))[self.top]

    def instances(self, rng: np.random.Generator, number: int, train: bool) -> Stream:
        symbols, of = random_sentences(rng, self.grammar, self.top, number)
        sizes = 1 + np.bincount(of, minlength=number)
        starts = np.cumsum(sizes) - sizes
        tokens = np.zeros(len(symbols) + number, np.int64)
        tokens[np.arange(len(symbols)) + of + 1] = symbols  # each shifted by the number of bos before it
        return Stream(tokens, np.ones(len(tokens), np.bool_), starts)

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        found = super().draw(generator, count, train)
        if train:
            return found
        exact = np.zeros((count, self.length, self.vocabulary), np.float32)
        for row, tokens in zip(exact, found.inputs.numpy(), strict=True):
            begins = np.nonzero(tokens == 0)[0]
            for begin, end in zip(begins, [*begins[1:], self.length], strict=True):
                row[begin:end] = self.parser.next_chances(tokens[begin + 1 : end])[: end - begin]
        return replace(found, exact=torch.from_numpy(exact))
