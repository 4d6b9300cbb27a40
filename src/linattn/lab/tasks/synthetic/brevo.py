"""Brevo: how broadly a model reasons, by sorting what a node depends on (Physics of Language Models 4.1)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from linattn.lab.tasks.synthetic.brevo_answers import chances
from linattn.lab.tasks.synthetic.brevo_graphs import Graphs, random_graphs
from linattn.lab.tasks.synthetic.packed import PackedTask, Stream, numpy_random
from linattn.lab.tasks.synthetic.ragged import Ints, below, groups, shuffled, written
from linattn.lab.tasks.synthetic.sizes import SMALLEST, draw_sizes, mean_size
from linattn.lab.tasks.synthetic.words import Words
from linattn.lab.tasks.text.batch import IGNORED, Sequences
from linattn.lab.tasks.text.checks import at_least, one_of
from linattn.lab.tasks.text.once import once
from linattn.support.seeds import stream

SOURCES = ("paper", "released")
FAR = 1e6  # separates the times of one graph from those of the next


@dataclass(frozen=True, kw_only=True)
class Brevo(PackedTask):
    """``bos  parent child  parent child ...  [query] q [answer] a b ... q eos``: edges of an acyclic graph in random
    order, then a node; the answer is all that the node depends on, in any order that puts parents first.

    Graphs of training have n nodes, ``3 .. nodes``, small n more often; graphs of a test have ``nodes``. The loss is on
    the answer and ``eos``. A token is legal if some right answer continues with it. ``exact_match`` counts answers
    whose tokens are all legal, each given the right ones before it; ``accuracy`` counts tokens of the order drawn.

    Args:
        nodes: N, the largest n.
        letters, word_length: names are words of ``first .. last`` tokens over this many letters; None: N names of one
            token.
        source: "paper": the query is a node of the last quarter; "released": always the last node, as in the
            published code.
        length: tokens of a window, which holds several instances.
    """

    name = "brevo"
    metric = "exact_match"
    nodes: int = 70
    letters: int | None = None
    word_length: tuple[int, int] = (1, 1)
    source: str = "paper"
    length: int = 1024
    test_examples: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("nodes", self.nodes, SMALLEST)
        one_of("source", self.source, SOURCES)
        self.words.check(self.nodes)
        self.check_length()

    @once
    def words(self) -> Words:
        return Words(self.nodes if self.letters is None else self.letters, *self.word_length)

    @property
    def vocabulary(self) -> int:
        """Number of tokens: letters, then ``bos``, the marks of the query and of the answer, and ``eos``."""
        return self.words.tokens + 4

    @property
    def bos(self) -> int:
        return self.words.tokens

    @once
    def _lexicon(self) -> tuple[Ints, Ints]:
        marks = np.zeros((4, self.words.longest), np.int64)
        marks[:, 0] = self.bos + np.arange(4)
        lengths = np.concatenate([self.words.lengths, np.ones(4, np.int64)])
        return np.concatenate([self.words.lexicon, marks]), lengths

    def typical(self, train: bool) -> float:
        nodes = mean_size(self.nodes, train)
        return 5 + sum(self.word_length) / 2 * (2 * 2.4 * 0.8 * nodes + 0.6 * nodes)

    def instances(self, rng: np.random.Generator, number: int, train: bool) -> Stream:
        sizes = draw_sizes(rng, number, self.nodes, train)
        graphs = random_graphs(rng, sizes)
        names, base = self.words.distinct(rng, sizes), np.cumsum(sizes) - sizes
        asked_for = self._queries(rng, sizes)
        owner, child, place = np.nonzero(graphs.parents >= 0)
        order = shuffled(rng, owner)
        owner, child, parent = owner[order], child[order], graphs.parents[owner, child, place][order]
        whose, node = _answers(graphs, asked_for)
        edges, answers = groups(np.bincount(owner, minlength=number)), groups(np.bincount(whose, minlength=number))
        pieces = 5 + 2 * edges.sizes + answers.sizes
        first, mark = np.cumsum(pieces) - pieces, len(self.words.lengths)
        slots, asked = np.empty(pieces.sum(), np.int64), np.zeros(pieces.sum(), np.bool_)
        slots[first] = mark
        at = first[owner] + 1 + 2 * edges.inner
        slots[at], slots[at + 1] = names[base[owner] + parent], names[base[owner] + child]
        query = first + 1 + 2 * edges.sizes
        slots[query], slots[query + 1], slots[query + 2] = mark + 1, names[base + asked_for], mark + 2
        at, end = query[whose] + 3 + answers.inner, query + 3 + answers.sizes
        slots[at], asked[at] = names[base[whose] + node], True
        slots[end], asked[end] = mark + 3, True
        lexicon, lengths = self._lexicon
        tokens, spans = written(lexicon, lengths, slots)
        return Stream(tokens, np.repeat(asked, spans), (np.cumsum(spans) - spans)[first])

    def _queries(self, rng: np.random.Generator, sizes: Ints) -> Ints:
        if self.source == "released":
            return sizes - 1
        return 3 * sizes // 4 + below(rng, sizes - 3 * sizes // 4)

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

    @torch.no_grad()
    def score(self, logits: Tensor, batch: Sequences) -> dict[str, Tensor]:
        sums = super().score(logits, batch)
        assert batch.exact is not None
        scored = batch.targets != IGNORED
        width = batch.exact.shape[-1]
        best = logits.argmax(-1)
        chance = batch.exact.gather(-1, best.clamp(max=width - 1)[..., None])[..., 0]
        illegal = scored & ((best >= width) | (chance <= 0))
        instance = (batch.inputs == self.bos).cumsum(1)
        shape = (len(scored), self.length + 1)
        asked, wrong = (
            torch.zeros(shape, dtype=torch.int64, device=scored.device).scatter_add_(1, instance, flags.long())
            for flags in (scored, illegal)
        )
        sums["answers"] = (asked > 0).sum().double()
        sums["right"] = ((asked > 0) & (wrong == 0)).sum().double()
        return sums

    def metrics(self, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        right = 100 * float(sums["right"]) / max(float(sums["answers"]), 1.0)
        return super().metrics(sums) | {"exact_match": right}


def _answers(graphs: Graphs, queries: Ints) -> tuple[Ints, Ints]:
    """Graph and node of every entry of the answers, graph after graph, in the order of times."""
    whose, node = np.nonzero(graphs.ancestors(queries))
    order = np.argsort(whose * FAR + graphs.times[whose, node])
    return whose[order], node[order]
