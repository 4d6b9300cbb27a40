"""Depo: how deep a model reasons, by hops along a directed cycle (Physics of Language Models 4.1, arXiv:2512.17351)."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linattn.lab.tasks.synthetic.packed import (
    SMALLEST,
    Ints,
    PackedTask,
    Stream,
    below,
    draw_sizes,
    groups,
    mean_size,
    shuffled,
    written,
)  # fmt: skip
from linattn.lab.tasks.synthetic.words import Words
from linattn.lab.tasks.text.generated import Range
from linattn.lab.tasks.text.task import IGNORED, Sequences, once
from linattn.support.config import option


@dataclass(frozen=True, kw_only=True)
class Depo(PackedTask):
    """``bos  w_a w_a+1  w_b w_b+1 ...  [k] w_i [answer] w_i+k ...``: edges of a cycle of n names in random order, then
    queries, each for the name k steps after a given one.

    In training n is ``3 .. nodes``, small n more often, and k is ``1 .. hops``. In a test n is ``nodes``, and k is a
    power of two up to ``hops`` or ``hops`` itself (also 24 if ``hops`` is 32). The loss is on answers, and in training
    also on the mark before them. ``accuracy`` counts tokens of answers, ``accuracy_k`` those with a certain k.

    Example:
        >>> task = Depo(letters=9, word_length=(1, 1), nodes=3, hops=2, queries=1, length=12)
        >>> batch = task.batch(0, 1)
        >>> batch.inputs.tolist(), batch.targets.tolist()[0][9:11]
        ([[10, 7, 3, 3, 9, 9, 7, 12, 7, 11, 3, 10]], [3, -100])
    """

    name = "depo"
    letters: int = option(50, "Letters of names, which are random words.")
    word_length: Range = option((1, 2), "Names have first .. last tokens.")
    nodes: int = option(225, "N, the largest n.", least=SMALLEST)
    hops: int = option(8, "K, the largest k.", least=1)
    queries: int = option(10, "Most queries of an instance, which never has more than n.", least=1)
    length: int = option(2048, "Tokens of a window, which holds several instances.")
    test_examples: int = option(256, "Test sequences.", least=1)

    def check(self) -> None:
        self.words.check(self.nodes)
        super().check()

    @once
    def words(self) -> Words:
        return Words(self.letters, *self.word_length)

    @property
    def vocabulary(self) -> int:
        """Number of tokens: letters, then ``bos``, the mark of answers, and a token for each k."""
        return self.words.tokens + 2 + self.hops

    @property
    def tested_hops(self) -> list[int]:
        """The values of k in a test.

        Example:
            >>> Depo(hops=32).tested_hops
            [1, 2, 4, 8, 16, 24, 32]
        """
        powers = {2**i for i in range(self.hops.bit_length()) if 2**i <= self.hops}
        return sorted(powers | {self.hops} | ({24} if self.hops == 32 else set()))

    @once
    def _lexicon(self) -> tuple[Ints, Ints]:
        """Tokens and lengths of all words, then of the marks as words of one token."""
        marks = np.zeros((2 + self.hops, self.words.longest), np.int64)
        marks[:, 0] = self.words.tokens + np.arange(len(marks))
        lengths = np.concatenate([self.words.lengths, np.ones(len(marks), np.int64)])
        return np.concatenate([self.words.lexicon, marks]), lengths

    def typical(self, train: bool) -> float:
        word = sum(self.word_length) / 2
        nodes = mean_size(self.nodes, train)
        return 1 + 2 * nodes * word + min(nodes, self.queries) * (2 + 2 * word)

    def instances(self, rng: np.random.Generator, number: int, train: bool) -> Stream:
        sizes = draw_sizes(rng, number, self.nodes, train)
        names, nodes = self.words.distinct(rng, sizes), groups(sizes)
        asked_for = groups(np.minimum(sizes, self.queries))

        def after(node: Ints, steps: Ints) -> Ints:
            """The nodes that are this many ``steps`` along the cycle of their instance."""
            own = nodes.of[node]
            return nodes.base[own] + (nodes.inner[node] + steps) % sizes[own]

        hops = self._hops(rng, len(asked_for.of), train)
        order, other = shuffled(rng, nodes.of), shuffled(rng, nodes.of)
        start = other[nodes.base[asked_for.of] + asked_for.inner]
        bos = len(self.words.lengths)
        pieces = 1 + 2 * sizes + 4 * asked_for.sizes
        first = np.cumsum(pieces) - pieces
        slots, asked = np.empty(pieces.sum(), np.int64), np.zeros(pieces.sum(), np.bool_)
        slots[first] = bos
        edge = first[nodes.of] + 1 + 2 * nodes.inner
        slots[edge], slots[edge + 1] = names[order], names[after(order, np.ones_like(order))]
        query = (first + 1 + 2 * sizes)[asked_for.of] + 4 * asked_for.inner
        slots[query], slots[query + 1] = bos + 1 + hops, names[start]
        slots[query + 2], slots[query + 3] = bos + 1, names[after(start, hops)]
        asked[query + 2], asked[query + 3] = train, True
        lexicon, lengths = self._lexicon
        tokens, spans = written(lexicon, lengths, slots)
        return Stream(tokens, np.repeat(asked, spans), (np.cumsum(spans) - spans)[first])

    def _hops(self, rng: np.random.Generator, number: int, train: bool) -> Ints:
        if train:
            return 1 + below(rng, np.full(number, self.hops))
        tested = np.array(self.tested_hops)
        return tested[below(rng, np.full(number, len(tested)))]

    @torch.no_grad()
    def score(self, logits: Tensor, batch: Sequences) -> dict[str, Tensor]:
        sums = super().score(logits, batch)
        first = self.words.tokens + 1  # the token of k is k higher
        places = torch.arange(batch.inputs.shape[1], device=batch.inputs.device)
        latest = torch.where(batch.inputs > first, places, 0).cummax(1).values
        hops, scored = batch.inputs.gather(1, latest) - first, batch.targets != IGNORED
        hit = logits.argmax(-1) == batch.targets
        for k in self.tested_hops:
            own = scored & (hops == k)
            sums[f"correct_{k}"], sums[f"total_{k}"] = (own & hit).sum().double(), own.sum().double()
        return sums

    def metrics(self, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        by_hops = {
            f"accuracy_{k}": 100 * float(sums[f"correct_{k}"]) / max(float(sums[f"total_{k}"]), 1.0)
            for k in self.tested_hops
        }
        return super().metrics(sums) | by_hops
