"""Lano: how well a model finds structure, by sentences of a context-free grammar (Physics of Language Models 4.1)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.lab.tasks.synthetic.lano_grammars import RULES, TERMINALS, grammar, lengths, random_sentences
from linattn.lab.tasks.synthetic.lano_parser import Parser
from linattn.lab.tasks.synthetic.packed import PackedTask, Stream
from linattn.lab.tasks.text.batch import IGNORED, Sequences
from linattn.lab.tasks.text.checks import one_of
from linattn.lab.tasks.text.once import once


@dataclass(frozen=True, kw_only=True)
class Lano(PackedTask):
    """``bos 3 1 2 ... bos 1 1 ...``: random sentences of a grammar, each rule of a symbol being equally likely.

    The loss is on all tokens. In a test the true distribution of every next token is known: ``kl`` is the divergence of
    the model from it in nats per token, and ``legal`` counts predictions with which some sentence continues.

    Args:
        grammar: "cfg3f", "cfg3j" or "cfg3k".
        root: the symbol that sentences derive from; None: that of the paper. A lower one gives shorter sentences.
        length: tokens of a window, which holds several sentences.

    Example:
        >>> task = Lano(root=9, length=8)
        >>> task.valid([1, 2, 1]), task.valid([1, 2])
        (True, False)
    """

    name = "lano"
    metric = "kl"
    higher_is_better = False
    grammar: str = "cfg3f"
    root: int | None = None
    length: int = 512
    test_examples: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("grammar", self.grammar, RULES)
        if self.root is not None:
            one_of("root", self.root, sorted(grammar(self.grammar)))
        self.check_length()

    @property
    def top(self) -> int:
        return max(grammar(self.grammar)) if self.root is None else self.root

    @property
    def vocabulary(self) -> int:
        """Number of tokens: the terminals, and ``bos``, which is 0."""
        return 1 + TERMINALS

    @once
    def parser(self) -> Parser:
        return Parser(grammar(self.grammar), self.top)

    def valid(self, sentence: list[int]) -> bool:
        """Whether the grammar has this sentence, the tokens between two ``bos``."""
        return bool(sentence) and all(1 <= token <= TERMINALS for token in sentence) and self.parser.accepts(sentence)

    def typical(self, train: bool) -> float:
        return 1 + lengths(grammar(self.grammar))[self.top].mean

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

    @torch.no_grad()
    def score(self, logits: Tensor, batch: Sequences) -> dict[str, Tensor]:
        sums = super().score(logits, batch)
        assert batch.exact is not None
        scored = batch.targets != IGNORED
        exact = F.pad(batch.exact, (0, logits.shape[-1] - batch.exact.shape[-1]))[scored]
        entropy = -torch.special.xlogy(exact, exact).double().sum()
        sums["kl"] = -(exact * logits[scored].float().log_softmax(-1)).double().sum() - entropy
        return sums

    def metrics(self, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        return super().metrics(sums) | {"kl": float(sums["kl"]) / max(float(sums["total"]), 1.0)}
