"""RegBench (arXiv:2401.12973): learn a regular language from examples in the sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.lab.tasks.text.generated import GeneratedTask, Range, choose, distinct, require, whole
from linattn.lab.tasks.text.task import IGNORED, Sequences
from linattn.support.config import option

TEST_PARTS = 8  # one automaton in eight is kept for tests


@dataclass(frozen=True, kw_only=True)
class RegBench(GeneratedTask):
    """Words of a random automaton, joined by bars; all symbols are to be predicted, but not the bars.

    Each sequence has its own automaton and ``words`` walks of ``word_length`` symbols from node 0, in which all allowed
    symbols are equally likely. Symbols are ``0 .. symbols - 1``, the bar is ``symbols``, padding is ``symbols + 1``.
    All ranges include their ends. Whether an automaton is for training or for tests depends on the sequences that it
    allows, so no test automaton is used in training with its nodes renumbered. Test batches have the exact distribution
    of the next symbol, and the score counts how often the likeliest token is ``legal``.
    """

    name = "regbench"
    kind = "causal"
    metric = "legal"
    symbols: int = option(18, "Symbols of all alphabets.", least=2)
    nodes: Range = option((4, 12), "Range of the nodes of an automaton.", least=2)
    alphabet: Range = option((4, 18), "Range of the symbols of an automaton.", least=1)
    edges: Range = option((1, 3), "Range of the edges at a node.", least=1)
    words: Range = option((10, 19), "Range of the words of a sequence.", least=1)
    word_length: Range = option((1, 49), "Range of the symbols of a word.", least=1)
    train_examples: int | None = option(5000, "Size of a fixed training set; none: new ones in each step.", least=1)
    test_examples: int = option(500, "Test sequences.", least=1)

    def check(self) -> None:
        super().check()
        require("alphabet", self.alphabet[1] <= self.symbols, f"within the {self.symbols} symbols", self.alphabet)
        most = min(self.alphabet[0], self.nodes[0] - 1)
        allowed = f"at most {most}, the smallest alphabet and the nodes other than itself"
        require("edges", self.edges[1] <= most, allowed, self.edges)

    @property
    def vocabulary(self) -> int:
        return self.symbols + 2

    @property
    def length(self) -> int:
        return self.words[1] * (self.word_length[1] + 1) - 1

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        return self.sequences(generator, self.automata(generator, count, train), exact=not train)

    def automata(self, generator: torch.Generator, count: int, train: bool) -> Tensor:
        """Tables ``(count, nodes, symbols)`` of automata for training, or for tests."""
        found: list[Tensor] = []
        while len(found) < count:
            number = (count - len(found)) * (1 if train else TEST_PARTS) + 4
            for one in random_automata(generator, number, self):
                # The side depends only on the sequences that an automaton allows.
                digest = blake2b(repr(canonical(one.tolist())).encode(), digest_size=8).digest()
                if (int.from_bytes(digest, "big") % TEST_PARTS > 0) == train:
                    found.append(one)
        return torch.stack(found[:count])

    def sequences(self, generator: torch.Generator, tables: Tensor, exact: bool) -> Sequences:
        """A batch with words of each automaton, joined by bars."""
        count, most = len(tables), self.words[1]
        words, lengths = whole(generator, *self.words, count, 1), whole(generator, *self.word_length, count, most)
        walks, nodes = random_walks(generator, tables.repeat_interleave(most, 0), self.word_length[1])
        number, place = torch.arange(most), torch.arange(self.word_length[1] + 1)
        is_bar = (place == lengths[..., None]) & (number < words - 1)[..., None]  # none after the last word
        used = (((place < lengths[..., None]) & (number < words)[..., None]) | is_bar).flatten(1)

        def laid(values: Tensor, filler: int) -> Tensor:
            """Values of the steps of all words, and of the bars, in the order of a sequence, ``(count, length)``."""
            return values.flatten(1).gather(1, order).masked_fill(~mask, filler)

        order = used.long().argsort(dim=1, descending=True, stable=True)[:, : self.length]
        mask = torch.arange(self.length) < used.sum(1, keepdim=True)
        walks, nodes = (F.pad(steps.view(count, most, -1), (0, 1)) for steps in (walks, nodes))
        inputs = laid(walks.masked_fill(is_bar, self.symbols), self.symbols + 1)
        following = F.pad(inputs[:, 1:], (0, 1), value=self.symbols + 1)
        targets = following.masked_fill(following >= self.symbols, IGNORED)
        if not exact:
            return Sequences(inputs, targets, mask)
        at = laid(nodes, 0)[:, 1:]
        legal = tables.gather(1, at[..., None].expand(-1, -1, self.symbols)) >= 0
        legal = F.pad(legal.float(), (0, 2, 0, 1))
        return Sequences(inputs, targets, mask, legal / legal.sum(-1, keepdim=True).clamp(min=1))


def random_automata(generator: torch.Generator, count: int, task: RegBench) -> Tensor:
    """Random tables ``(count, max nodes, symbols)``: the node that a symbol leads to, -1 where it is not allowed.

    Numbers of nodes, of letters in the alphabet and of edges at a node are uniform in the ranges, ends included. Each
    automaton has its own alphabet among the ``symbols``. The edges of a node have distinct symbols and lead to distinct
    other nodes. All automata start at node 0.
    """
    high, most, symbols = task.nodes[1], task.edges[1], task.symbols
    sizes = whole(generator, *task.nodes, count)
    letters = choose(generator, count, symbols, symbols) < whole(generator, *task.alphabet, count, 1)
    node = torch.arange(high)
    allowed = (node < sizes[:, None])[:, None] & (node != node[:, None])  # (count, from, to)
    to = distinct(generator, count * high, allowed.flatten(0, 1).double(), most)
    by = distinct(generator, count * high, letters.double().repeat_interleave(high, 0), most)
    kept = torch.arange(most) < whole(generator, *task.edges, count * high, 1)
    table = torch.full((count * high, symbols), -1)
    table.scatter_(1, by, to.masked_fill(~kept, -1))
    return table.view(count, high, symbols).masked_fill((node >= sizes[:, None])[..., None], -1)


def canonical(table: Sequence[Sequence[int]]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The smallest automaton that allows the same sequences, with nodes in the order in which they are first reached.

    Two tables give the same result if and only if they allow the same sequences, however their nodes are numbered.
    """
    rows = [{symbol: to for symbol, to in enumerate(row) if to >= 0} for row in table]
    # Nodes are separated by what may follow, one symbol further in each round, until a round separates no more.
    group = [0] * len(rows)
    while True:
        signs = [(group[n], *((symbol, group[to]) for symbol, to in row.items())) for n, row in enumerate(rows)]
        names = {sign: number for number, sign in enumerate(dict.fromkeys(signs))}
        finer = [names[sign] for sign in signs]
        if len(names) == len(set(group)):
            break
        group = finer
    some = dict(zip(group, rows, strict=True))
    order = {group[0]: 0}
    queue = [group[0]]
    for current in queue:
        for to in some[current].values():
            if group[to] not in order:
                order[group[to]] = len(order)
                queue.append(group[to])
    return tuple(tuple((symbol, order[group[to]]) for symbol, to in some[member].items()) for member in queue)


def random_walks(generator: torch.Generator, table: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Walks from node 0 through ``table (N, nodes, symbols)``, each allowed symbol being equally likely.

    Returns the symbols ``(N, steps)`` and the nodes ``(N, steps)`` at which they were drawn.
    """
    every, node = torch.arange(len(table)), torch.zeros(len(table), dtype=torch.int64)
    steps_of: list[tuple[Tensor, Tensor]] = []
    for _ in range(steps):
        here = table[every, node]
        symbol = distinct(generator, len(table), (here >= 0).double(), 1)[:, 0]
        steps_of.append((symbol, node))
        node = here[every, symbol]
    symbols, nodes = zip(*steps_of, strict=True)
    return torch.stack(symbols, 1), torch.stack(nodes, 1)
