"""MAD's fuzzy recall (arXiv:2403.17844): keys and values of several tokens."""

from dataclasses import dataclass
from random import Random

import torch

from linattn.lab.tasks.text.batch import IGNORED, Sequences
from linattn.lab.tasks.text.checks import at_least, require
from linattn.lab.tasks.text.draws import python_random
from linattn.lab.tasks.text.generated import GeneratedTask
from linattn.lab.tasks.text.mad_recall import next_tokens

Motif = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class FuzzyRecall(GeneratedTask):
    """``k v k v ...``, where a key has 1 to ``key_tokens`` different tokens and a value 1 to ``value_tokens``.

    Each key has one value in the whole sequence, and the last pair repeats an earlier one. In tests all keys have
    ``key_tokens`` tokens, and only values of keys that appeared before are scored; training scores every next token.
    Sequences are padded on the left with the last token of the vocabulary, which ``key_mask`` masks.
    """

    name = "mad-fuzzy-recall"
    kind = "causal"
    vocab: int = 16
    length: int = 128
    key_tokens: int = 3
    value_tokens: int = 3
    test_examples: int = 1280

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("key_tokens", self.key_tokens, 1)
        at_least("value_tokens", self.value_tokens, 1)
        longest = max(self.key_tokens, self.value_tokens)
        low = 2 * longest + 2
        require("vocab", self.vocab >= low, f"at least {low}, two motifs of {longest} and padding", self.vocab)
        low = 3 * (self.key_tokens + self.value_tokens)
        require("length", self.length >= low, f"at least {low}, three pairs", self.length)

    @property
    def vocabulary(self) -> int:
        return self.vocab

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        random, pad = python_random(generator), self.vocab - 1
        inputs = torch.full((count, self.length), pad)
        targets = torch.full((count, self.length), IGNORED)
        for row in range(count):
            tokens, scored = self._sequence(random, train)
            inputs[row, -len(tokens) :] = torch.tensor(tokens)
            targets[row, -len(tokens) :] = torch.tensor(scored)
        mask = inputs != pad
        return Sequences(inputs, next_tokens(inputs).masked_fill(~mask, IGNORED) if train else targets, mask)

    def _sequence(self, random: Random, train: bool) -> tuple[list[int], list[int]]:
        """Tokens, and at each the target: the next token if that is part of a value whose key appeared before."""
        half = (self.vocab - 1) // 2
        smallest = 1 if train else self.key_tokens

        def motif(first: int, last: int, low: int, high: int) -> Motif:
            return tuple(random.sample(range(first, last), random.randint(low, high)))

        values: dict[Motif, Motif] = {}
        pairs: list[tuple[Motif, bool]] = []
        probe: Motif = ()
        used = 0
        while True:
            key = motif(0, half, smallest, self.key_tokens)
            value = values.get(key) or motif(half, self.vocab - 1, 1, self.value_tokens)
            if pairs and used + len(key) + len(value) + len(probe) + len(values[probe]) > self.length:
                break
            pairs.append((key, key in values))
            values[key] = value
            used += len(key) + len(value)
            # Every pair has the same chance of being the one repeated at the end.
            if random.random() * len(pairs) < 1 and used + len(key) + len(value) <= self.length:
                probe = key
        tokens: list[int] = []
        scored: list[int] = []
        for key, known in [*pairs, (probe, True)]:
            value = values[key]
            tokens += key + value
            scored += [IGNORED] * (len(key) - 1) + list(value if known else [IGNORED] * len(value)) + [IGNORED]
        return tokens, scored
