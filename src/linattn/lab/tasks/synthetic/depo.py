"""Depo: how deep a model reasons, by hops along a directed cycle (Physics of Language Models 4.1, arXiv:2512.17351)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linattn.lab.tasks.synthetic.packed import SMALLEST, Ints, NamedTask, Stream, below, groups, shuffled
from linattn.lab.tasks.text.task import Sequences
from linattn.support.config import option


@dataclass(frozen=True, kw_only=True)
class Depo(NamedTask):
    """``bos  w_a w_a+1  w_b w_b+1 ...  [k] w_i [answer] w_i+k ...``: edges of a cycle of n names in random order, then
    queries, each for the name k steps after a given one.

    In training n is ``3 .. nodes``, small n more often, and k is ``1 .. hops``. In a test n is ``nodes``, and k is a
    power of two up to ``hops`` or ``hops`` itself (also 24 if ``hops`` is 32). The loss is on answers, and in training
    also on the mark before them. ``accuracy`` counts tokens of answers, ``accuracy_k`` those with a certain k. The
    marks are ``bos``, that of answers, and one for each k.

    Example:
        >>> task = Depo(letters=9, word_length=(1, 1), nodes=3, hops=2, queries=1, length=12)
        >>> batch = task.batch(0, 1)
        >>> batch.inputs.tolist(), batch.targets.tolist()[0][9:11]
        ([[10, 7, 3, 3, 9, 9, 7, 12, 7, 11, 3, 10]], [3, -100])
    """

    name = "depo"
    letters: int = option(50, "Letters of names, which are random words.", least=1)
    nodes: int = option(225, "N, the largest n.", least=SMALLEST)
    hops: int = option(8, "K, the largest k.", least=1)
    queries: int = option(10, "Most queries of an instance, which never has more than n.", least=1)
    length: int = option(2048, "Tokens of a window, which holds several instances.")
    test_examples: int = option(256, "Test sequences.", least=1)

    @property
    def marks(self) -> int:
        return 2 + self.hops

    @property
    def tested_hops(self) -> list[int]:
        """The values of k in a test.

        Example:
            >>> Depo(hops=32).tested_hops
            [1, 2, 4, 8, 16, 24, 32]
        """
        powers = {2**i for i in range(self.hops.bit_length())}
        return sorted(powers | {self.hops} | ({24} if self.hops == 32 else set()))

    def typical(self, train: bool) -> float:
        word, nodes = sum(self.word_length) / 2, self.mean_size(train)
        return 1 + 2 * nodes * word + min(nodes, self.queries) * (2 + 2 * word)

    def instances(self, rng: np.random.Generator, number: int, train: bool) -> Stream:
        sizes = self.sizes(rng, number, train)
        names, nodes = self.words.distinct(rng, sizes), groups(sizes)
        queries = groups(np.minimum(sizes, self.queries))

        def after(node: Ints, steps: Ints | int) -> Ints:
            """The nodes that are this many ``steps`` along the cycle of their instance."""
            own = nodes.of[node]
            return nodes.base[own] + (nodes.inner[node] + steps) % sizes[own]

        tested = np.arange(1, self.hops + 1) if train else np.array(self.tested_hops)
        hops = tested[below(rng, np.full(len(queries.of), len(tested)))]
        order, other = shuffled(rng, nodes.of), shuffled(rng, nodes.of)
        start = other[nodes.base[queries.of] + queries.inner]
        bos = len(self.words.lengths)
        pieces = 1 + 2 * sizes + 4 * queries.sizes
        first = np.cumsum(pieces) - pieces
        slots, asked = np.empty(pieces.sum(), np.int64), np.zeros(pieces.sum(), np.bool_)
        slots[first] = bos
        edge = first[nodes.of] + 1 + 2 * nodes.inner
        slots[edge], slots[edge + 1] = names[order], names[after(order, 1)]
        query = (first + 1 + 2 * sizes)[queries.of] + 4 * queries.inner
        slots[query], slots[query + 1] = bos + 1 + hops, names[start]
        slots[query + 2], slots[query + 3] = bos + 1, names[after(start, hops)]
        asked[query + 2], asked[query + 3] = train, True
        return self.written(slots, asked, first)

    def subsets(self, batch: Sequences) -> dict[str, Tensor]:
        first = self.bos + 1  # the token of k is k higher
        places = torch.arange(batch.inputs.shape[1], device=batch.inputs.device)
        latest = torch.where(batch.inputs > first, places, 0).cummax(1).values
        hops = batch.inputs.gather(1, latest) - first
        return {str(k): hops == k for k in self.tested_hops}
