"""Lano: how well a model finds structure, by sentences of a context-free grammar (Physics of Language Models 4.1).

The grammars, the task, and charts that tell whether a grammar has a sentence and what may follow each of its prefixes.
"""

from collections.abc import Sequence
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
def grammar(name: str, root: int | None = None) -> Rules:
    """The rules of each symbol of the grammar ``name`` up to ``root`` (None: all), parts before their symbols.

    Example:
        >>> grammar("cfg3f")[9]
        [[1, 2, 1], [3, 3], [1, 1]]
    """
    found: Rules = {}
    for line in RULES[name].split("; "):
        symbol, rules = line.split("->")
        if root is None or int(symbol) <= root:
            found[int(symbol)] = [[int(part) for part in rule.split()] for rule in rules.split("|")]
    return dict(sorted(found.items()))


def mean_length(rules: Rules) -> float:
    """Terminals that the last symbol derives on average, each rule of a symbol being equally likely."""
    found = dict.fromkeys(range(1, TERMINALS + 1), 1.0)
    for symbol, parts in rules.items():
        found[symbol] = sum(sum(found[part] for part in rule) for rule in parts) / len(parts)
    return found[max(rules)]


def random_sentences(rng: np.random.Generator, rules: Rules, number: int) -> tuple[Ints, Ints]:
    """Terminals of ``number`` random sentences end to end, and the number of the sentence that each belongs to."""
    most, symbols, of = max(map(len, rules.values())), np.full(number, max(rules)), np.arange(number)
    counts = np.zeros(max(rules) + 1, np.int64)
    sizes, parts = np.zeros((len(counts), most), np.int64), np.zeros((len(counts), most, 3), np.int64)
    for symbol, found in rules.items():
        counts[symbol] = len(found)
        for place, rule in enumerate(found):
            sizes[symbol, place], parts[symbol, place, : len(rule)] = len(rule), rule
    while symbols[0] > TERMINALS:
        choice = below(rng, counts[symbols])
        members = groups(sizes[symbols, choice])
        symbols = parts[symbols[members.of], choice[members.of], members.inner]
        of = of[members.of]
    return symbols, of


def inside(rules: Rules, sentence: Sequence[int]) -> dict[int, Floats]:
    """``[a][i, d]``: the chance that symbol a derives the d tokens from place i on, each rule being equally likely."""
    size, tokens = len(sentence), np.asarray(sentence, np.int64)
    charts = {token: np.zeros((size + 1, 2)) for token in range(1, TERMINALS + 1)}
    for token, chart in charts.items():
        chart[:size, 1] = SCALE * (tokens == token)
    for symbol, found in rules.items():
        charts[symbol] = total([reduce(joined, (charts[part] for part in rule)) for rule in found]) / len(found)
    return charts


def next_chances(rules: Rules, sentence: Sequence[int]) -> Floats:
    """Chances ``(T + 1, 4)`` of the end and of the tokens 1, 2 and 3, after each prefix of the sentence.

    They are zero after a prefix that no sentence begins with.
    """
    charts, size, root = inside(rules, sentence), len(sentence), max(rules)
    # ahead[a][i, d, x]: chance that symbol a derives the d tokens from place i on, then x, then anything.
    terminals = np.zeros((TERMINALS, size + 1, 1, TERMINALS))
    for token in range(TERMINALS):
        terminals[token, :, 0, token] = 1
    ahead = dict(enumerate(terminals, 1))
    for symbol, found in rules.items():
        reached = []
        for first, *others in found:
            reached.append(ahead[first])
            before = charts[first]
            for part in others:
                reached.append(joined(before, ahead[part]))
                before = joined(before, charts[part])
        ahead[symbol] = total(reached) / len(found)
    chances = np.zeros((size + 1, 1 + TERMINALS))
    whole, more = charts[root][0], ahead[root][0]
    chances[: len(whole), 0] = whole
    chances[: len(more), 1:] = more
    return chances / np.maximum(chances.sum(1, keepdims=True), 1e-300)


def total(charts: list[Floats]) -> Floats:
    """The sum of charts of different widths."""
    out = np.zeros((len(charts[0]), max(chart.shape[1] for chart in charts), *charts[0].shape[2:]))
    for chart in charts:
        out[:, : chart.shape[1]] += chart
    return out


def joined(first: Floats, then: Floats) -> Floats:
    """``out[i, d] = sum_e first[i, e] then[i + e, d - e]``: one part after the other; ``then`` may have more axes."""
    size = len(first)
    out = np.zeros((size, min(first.shape[1] + then.shape[1] - 1, size), *then.shape[2:]))
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
            check_option("root", self.root, grammar(self.grammar))
        super().check()

    @once
    def rules(self) -> Rules:
        return grammar(self.grammar, self.root)

    def valid(self, sentence: list[int]) -> bool:
        """Whether the grammar has this sentence, the tokens between two ``bos``."""
        chart = inside(self.rules, sentence)[max(self.rules)][0]
        return 0 < len(sentence) < len(chart) and bool(chart[len(sentence)] > 0)

    def typical(self, train: bool) -> float:
        return 1 + mean_length(self.rules)

    def instances(self, rng: np.random.Generator, number: int, train: bool) -> Stream:
        symbols, of = random_sentences(rng, self.rules, number)
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
                row[begin:end] = next_chances(self.rules, tokens[begin + 1 : end])[: end - begin]
        return replace(found, exact=torch.from_numpy(exact))
