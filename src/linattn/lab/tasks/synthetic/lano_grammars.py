"""The context-free grammars of Lano, level by level from a root to the terminals 1, 2 and 3."""

from functools import cache
from typing import NamedTuple

import numpy as np

from linattn.lab.tasks.synthetic.ragged import Ints, below, groups

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


class Lengths(NamedTuple):
    shortest: int
    mean: float
    longest: int


def lengths(rules: Rules) -> dict[int, Lengths]:
    """For each symbol the number of terminals it derives, each of its rules being equally likely.

    Example:
        >>> lengths(grammar("cfg3f"))[9]
        Lengths(shortest=2, mean=2.3333333333333335, longest=3)
    """
    found = {terminal: Lengths(1, 1.0, 1) for terminal in range(1, TERMINALS + 1)}
    for symbol in sorted(rules):  # the parts of a symbol have lower numbers
        parts = [[found[part] for part in rule] for rule in rules[symbol]]
        found[symbol] = Lengths(
            min(sum(part.shortest for part in rule) for rule in parts),
            sum(sum(part.mean for part in rule) for rule in parts) / len(parts),
            max(sum(part.longest for part in rule) for rule in parts),
        )
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
