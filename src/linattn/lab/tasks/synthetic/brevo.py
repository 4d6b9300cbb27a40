"""Brevo: how broadly a model reasons, by sorting what a node depends on (Physics of Language Models 4.1).

The task, its random graphs, and a check of answers from the tokens alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from linattn.lab.tasks.synthetic.packed import (
    SMALLEST,
    Flags,
    Floats,
    Ints,
    NamedTask,
    Stream,
    Words,
    below,
    groups,
    numpy_random,
    shuffled,
)
from linattn.lab.tasks.text.generated import Range
from linattn.lab.tasks.text.task import IGNORED, Sequences
from linattn.support.config import option
from linattn.support.seeds import stream

Name = tuple[int, ...]
MOST = 4  # the most parents, and the most children, of a node
FAR = 1e6  # separates the times of one graph from those of the next


@dataclass(frozen=True, kw_only=True)
class Brevo(NamedTask):
    """``bos  parent child  parent child ...  [query] q [answer] a b ... q eos``: edges of an acyclic graph in random
    order, then a node; the answer is all that the node depends on, in any order that puts parents first.

    Graphs of training have n nodes, ``3 .. nodes``, small n more often; graphs of a test have ``nodes``. The loss is on
    the answer and ``eos``. A token is legal if some right answer continues with it. ``exact_match`` counts answers
    whose tokens are all legal, each given the right ones before it; ``accuracy`` counts tokens of the order drawn. The
    marks are ``bos``, those of the query and of the answer, and ``eos``.
    """

    name = "brevo"
    metric = "exact_match"
    nodes: int = option(70, "N, the largest n.", least=SMALLEST)
    letters: int | None = option(None, "Letters of names; none: N names of one token.", least=1)
    word_length: Range = option((1, 1), "Names have first .. last tokens.", least=1)
    source: Literal["paper", "released"] = option(
        "paper", "The query is a node of the last quarter, or always the last node, as in the published code."
    )
    length: int = option(1024, "Tokens of a window, which holds several instances.")
    test_examples: int = option(128, "Test sequences.", least=1)
    marks = 4

    def typical(self, train: bool) -> float:
        nodes = self.mean_size(train)
        return 5 + sum(self.word_length) / 2 * (2 * 2.4 * 0.8 * nodes + 0.6 * nodes)

    def instances(self, rng: np.random.Generator, number: int, train: bool) -> Stream:
        sizes = self.sizes(rng, number, train)
        graphs = random_graphs(rng, sizes)
        names, base = self.words.distinct(rng, sizes), np.cumsum(sizes) - sizes
        least = 3 * sizes // 4
        queries = sizes - 1 if self.source == "released" else least + below(rng, sizes - least)
        owner, child, place = np.nonzero(graphs.parents >= 0)
        order = shuffled(rng, owner)
        owner, child, parent = owner[order], child[order], graphs.parents[owner, child, place][order]
        whose, node = np.nonzero(graphs.ancestors(queries))
        order = np.argsort(whose * FAR + graphs.times[whose, node])
        whose, node = whose[order], node[order]
        edges, answers = groups(np.bincount(owner, minlength=number)), groups(np.bincount(whose, minlength=number))
        pieces = 5 + 2 * edges.sizes + answers.sizes
        first, mark = np.cumsum(pieces) - pieces, len(self.words.lengths)
        slots, asked = np.empty(pieces.sum(), np.int64), np.zeros(pieces.sum(), np.bool_)
        slots[first] = mark
        at = first[owner] + 1 + 2 * edges.inner
        slots[at], slots[at + 1] = names[base[owner] + parent], names[base[owner] + child]
        query = first + 1 + 2 * edges.sizes
        slots[query], slots[query + 1], slots[query + 2] = mark + 1, names[base + queries], mark + 2
        at, end = query[whose] + 3 + answers.inner, query + 3 + answers.sizes
        slots[at], slots[end] = names[base[whose] + node], mark + 3
        asked[at] = asked[end] = True
        return self.written(slots, asked, first)

    def questions(self, number: int) -> list[list[int]]:
        """Test instances from ``bos`` to the mark of the answer, for models that generate the answer."""
        found = self.instances(numpy_random(stream("questions", self.data_seed)), number, False)
        ends = np.nonzero(found.tokens == self.bos + 2)[0] + 1
        return [found.tokens[begin:end].tolist() for begin, end in zip(found.starts, ends, strict=True)]

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        found = super().draw(generator, count, train)
        if train:
            return found
        exact = torch.zeros(count, self.length, self.vocabulary)
        for row, tokens, targets in zip(exact, found.inputs.tolist(), found.targets.tolist(), strict=True):
            for place, token, chance in chances(tokens, targets, self.words, self.bos):
                row[place, token] = chance
        return replace(found, exact=exact)

    def answers(self, batch: Sequences) -> Tensor:
        return (batch.inputs == self.bos).cumsum(1)


class Graphs(NamedTuple):
    """M graphs of at most N nodes; nodes are numbered after their parents.

    Attributes:
        sizes: ``n (M,)``.
        parents: ``(M, N, 4)``, -1 where there are fewer.
        times: ``(M, N)``. In their order a node comes after its parents, and all nodes that may come next are equally
            likely: a node is ready when its last parent has come, and then waits for an exponentially distributed time.
    """

    sizes: Ints
    parents: Ints
    times: Floats

    def ancestors(self, nodes: Ints) -> Flags:
        """Flags ``(M, N)`` of ``nodes[m]`` itself and all nodes that it depends on."""
        number, most = self.times.shape
        found = np.zeros((number, most + 1), np.bool_)  # the last column is for parents of -1, which are none
        found[np.arange(number), nodes] = True
        for node in range(most - 1, 0, -1):
            rows = np.nonzero(found[:, node])[0]
            found[rows[:, None], self.parents[rows, node]] = True
        return found[:, :most]


def random_graphs(rng: np.random.Generator, sizes: Ints) -> Graphs:
    """Draw graphs with ``L ~ U{1 .. (n - 1) // 4 + 1}`` leaves; every later node takes ``U{1 .. min(4, available)}``
    parents among earlier nodes with fewer than four children.

    All graphs grow by one node at a time. ``free[m, : left[m]]`` are the nodes of graph m that may become parents, in
    any order: chosen ones are exchanged with the last ones, where they are easily removed.
    """
    number, most = len(sizes), int(sizes.max())
    order = np.argsort(-sizes, kind="stable")  # so that graphs that still grow come first
    sizes = sizes[order]
    leaves = 1 + below(rng, (sizes - 1) // 4 + 1)
    # Node i of graph m has index m N + i in all these arrays: one index is several times as fast as two.
    row = np.arange(number) * most
    free = (row[:, None] + np.arange(most)).ravel()
    left, children = leaves.copy(), np.zeros(number * most, np.int8)
    parents, times = np.full((number * most, MOST), -1), rng.standard_exponential(number * most)
    for node in range(1, most):
        rows = np.nonzero((leaves <= node) & (node < sizes))[0]
        offset, available = row[rows], left[rows]
        wanted = 1 + below(rng, np.minimum(MOST, available))
        start, taken = np.zeros(len(rows)), []
        for j in range(MOST):
            some = np.nonzero(wanted > j)[0]
            own, last = offset[some], available[some] - 1 - j
            place, end = own + below(rng, last + 1), own + last
            parent = free[place]
            free[place] = free[end]
            free[end] = parent
            parents[own + node, j] = parent - own
            children[parent] += 1
            start[some] = np.maximum(start[some], times[parent])
            taken.append((some, end, parent))
        kept = available
        for some, place, parent in taken:
            full = children[parent] == MOST
            some, place = some[full], place[full]
            kept[some] -= 1
            free[place] = free[offset[some] + kept[some]]
        times[offset + node] += start
        free[offset + kept] = offset + node
        left[rows] = kept + 1
    back = np.argsort(order)
    return Graphs(sizes[back], parents.reshape(number, most, MOST)[back], times.reshape(number, most)[back])


class Question(NamedTuple):
    """``needed``: the names that the answer must contain; ``parents``: the names that must come before each."""

    needed: set[Name]
    parents: dict[Name, set[Name]]

    @classmethod
    def read(cls, tokens: list[int], words: Words, bos: int) -> "Question":
        """Read the tokens from ``bos`` to the mark of the answer."""
        mark = tokens.index(bos + 1)
        names = split(tokens[1:mark], words)
        parents: dict[Name, set[Name]] = {}
        for parent, child in zip(names[::2], names[1::2], strict=True):
            parents.setdefault(child, set()).add(parent)
        needed = set[Name]()
        waiting = split(tokens[mark + 1 : -1], words)
        while waiting:
            needed.add(waiting[-1])
            waiting += parents.get(waiting.pop(), set()) - needed
        return cls(needed, parents)

    def ready(self, done: set[Name]) -> list[Name]:
        """The names that may come next after those in ``done``."""
        return [name for name in self.needed - done if self.parents.get(name, set()) <= done]


def right_answer(question: list[int], answer: list[int], words: Words, bos: int) -> bool:
    """Whether ``answer``, without ``eos``, has every needed name once, after its parents."""
    asked, done = Question.read(question, words, bos), set[Name]()
    for name in split(answer, words):
        if name not in asked.ready(done):
            return False
        done.add(name)
    return done == asked.needed


def chances(tokens: list[int], targets: list[int], words: Words, bos: int) -> Iterator[tuple[int, int, float]]:
    """``(place, token, chance)`` of every token that may follow, for each scored place of a window.

    All names that may come next are equally likely; inside a name, those that begin with its tokens so far.
    """
    asked, done, begin = Question(set(), {}), set[Name](), 0
    begun: Name = ()
    for place, (token, target) in enumerate(zip(tokens, targets, strict=True)):
        if token == bos:
            begin = place
        elif token == bos + 2:
            asked, done, begun = Question.read(tokens[begin : place + 1], words, bos), set(), ()
        elif target != IGNORED:
            begun = (*begun, token)
            if begun in asked.needed:
                done.add(begun)
                begun = ()
        if target != IGNORED:
            waiting = [name for name in asked.ready(done) if name[: len(begun)] == begun]
            following = [name[len(begun)] for name in waiting] or [bos + 3]
            for one in set(following):
                yield place, one, following.count(one) / len(following)


def split(tokens: list[int], words: Words) -> list[Name]:
    """Split tokens into names; tokens after the last whole name become a name of their own, which matches none."""
    names: list[Name] = []
    begun: Name = ()
    for token in tokens:
        begun = (*begun, token)
        if words.longest == 1 or token > words.letters:
            names.append(begun)
            begun = ()
    return [*names, begun] if begun else names
