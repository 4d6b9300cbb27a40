"""RegBench (arXiv:2401.12973): learn a regular language from examples in the sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.lab.tasks.text.automata import Range, random_automata, random_walks, side
from linattn.lab.tasks.text.batch import IGNORED, Sequences
from linattn.lab.tasks.text.checks import at_least, ordered, require
from linattn.lab.tasks.text.draws import whole
from linattn.lab.tasks.text.generated import GeneratedTask

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
    symbols: int = 18
    nodes: Range = (4, 12)
    alphabet: Range = (4, 18)
    edges: Range = (1, 3)
    words: Range = (10, 19)
    word_length: Range = (1, 49)
    train_examples: int | None = 5000
    test_examples: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("symbols", self.symbols, 2)
        for name, low in (("nodes", 2), ("alphabet", 1), ("edges", 1), ("words", 1), ("word_length", 1)):
            ordered(name, getattr(self, name), low)
        require("alphabet", self.alphabet[1] <= self.symbols, f"within the {self.symbols} symbols", self.alphabet)
        most = min(self.alphabet[0], self.nodes[0] - 1)
        allowed = f"at most {most}, the smallest alphabet and the nodes other than itself"
        require("edges", self.edges[1] <= most, allowed, self.edges)

    @property
    def vocabulary(self) -> int:
        return self.symbols + 2

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.words[1] * (self.word_length[1] + 1) - 1

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        tables = self.automata(generator, count, train)
        return self.sequences(generator, tables, exact=not train)

    def automata(self, generator: torch.Generator, count: int, train: bool) -> Tensor:
        """Tables ``(count, nodes, symbols)`` of automata for training, or for tests."""
        found: list[Tensor] = []
        while len(found) < count:
            number = (count - len(found)) * (1 if train else TEST_PARTS) + 4
            drawn = random_automata(generator, number, self.symbols, self.nodes, self.alphabet, self.edges)
            rows = drawn.tolist()
            found += [drawn[n] for n, table in enumerate(rows) if (side(table, TEST_PARTS) > 0) == train]
        return torch.stack(found[:count])

    def sequences(self, generator: torch.Generator, tables: Tensor, exact: bool) -> Sequences:
        """A batch with words of each automaton, joined by bars."""
        count, most = len(tables), self.words[1]
        words, lengths = whole(generator, *self.words, count, 1), whole(generator, *self.word_length, count, most)
        walks, nodes = random_walks(generator, tables.repeat_interleave(most, 0), self.word_length[1])
        number, place = torch.arange(most), torch.arange(self.word_length[1] + 1)
        is_symbol = place < lengths[..., None]
        is_bar = (place == lengths[..., None]) & (number < words - 1)[..., None]  # none after the last word
        used = ((is_symbol & (number < words)[..., None]) | is_bar).flatten(1)
        bars = torch.full((count, most, 1), self.symbols)
        tokens = torch.cat([walks.view(count, most, -1), bars], 2).masked_fill(is_bar, self.symbols).flatten(1)
        inputs = left_aligned(tokens, used, self.symbols + 1)[:, : self.length]
        mask = torch.arange(self.length) < used.sum(1, keepdim=True)
        following = torch.nn.functional.pad(inputs[:, 1:], (0, 1), value=self.symbols + 1)
        targets = following.masked_fill(following >= self.symbols, IGNORED)
        chances = None
        if exact:
            at = torch.cat([nodes.view(count, most, -1), torch.zeros(count, most, 1, dtype=torch.int64)], 2).flatten(1)
            at = left_aligned(at, used, 0)[:, 1 : self.length]
            legal = tables.gather(1, at[..., None].expand(-1, -1, self.symbols)) >= 0
            legal = torch.nn.functional.pad(legal.float(), (0, 2, 0, 1))
            chances = legal / legal.sum(-1, keepdim=True).clamp(min=1)
        return Sequences(inputs, targets, mask, chances)


def left_aligned(values: Tensor, kept: Tensor, filler: int) -> Tensor:
    """``(B, N)`` with the kept values of each row first, in their order, then ``filler``."""
    order = kept.long().argsort(dim=1, descending=True, stable=True)
    rest = torch.arange(values.shape[1]) >= kept.sum(1, keepdim=True)
    return values.gather(1, order).masked_fill(rest, filler)
