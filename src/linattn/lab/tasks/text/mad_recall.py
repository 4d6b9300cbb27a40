"""Recall tasks of MAD (arXiv:2403.17844): look up the value that a key had earlier in the sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.lab.tasks.text.batch import IGNORED, Sequences
from linattn.lab.tasks.text.checks import at_least, between, require
from linattn.lab.tasks.text.draws import distinct
from linattn.lab.tasks.text.generated import GeneratedTask


@dataclass(frozen=True, kw_only=True)
class InContextRecall(GeneratedTask):
    """``k v k v ...``: random keys, each with one value in the whole sequence; the last key appeared before.

    Of the tokens without noise, the first half are keys and the second half values. Training scores every next token,
    a test only the values of keys that appeared before. The last ``noise_vocab`` tokens of ``vocab`` are noise: with
    chance ``noise``, a pair is replaced by two of them, except the last pair and one other.

    Args:
        vocab: number of tokens, noise included.
        length: T, even.

    Example:
        >>> batch = InContextRecall(vocab=4, length=8).batch(3, 1)
        >>> batch.inputs.shape, (batch.targets != IGNORED).nonzero()[:, 1].tolist()
        (torch.Size([1, 8]), [2, 4, 6])
    """

    name = "mad-recall"
    kind = "causal"
    vocab: int = 16
    length: int = 128
    noise: float = 0.0
    noise_vocab: int = 0
    test_examples: int = 1280

    def __post_init__(self) -> None:
        super().__post_init__()
        require("length", self.length % 2 == 0 and self.length >= 4, "even and at least 4", self.length)
        at_least("noise_vocab", self.noise_vocab, 0)
        require("vocab", self.vocab >= self.noise_vocab + 4, f"at least {self.noise_vocab + 4}", self.vocab)
        between("noise", self.noise, 0, 0.99)
        require("noise_vocab", self.noise == 0 or self.noise_vocab > 0, "at least 1 where there is noise", 0)

    @property
    def vocabulary(self) -> int:
        return self.vocab

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        tokens = self.vocab - self.noise_vocab
        num_keys, pairs = tokens // 2, self.length // 2
        keys = torch.randint(num_keys, (count, pairs), generator=generator)
        noisy = torch.rand(count, pairs, generator=generator) < self.noise
        # At least one pair stays, so that the last key has something to recall.
        noisy.scatter_(1, torch.randint(pairs - 1, (count, 1), generator=generator), False)
        noisy[:, -1] = False
        shown = F.one_hot(keys, num_keys).bool() & ~noisy[..., None]  # (count, pairs, keys)
        before = shown.cumsum(1) - shown.long() > 0
        probe = distinct(generator, count, before[:, -1].double(), 1)
        keys[:, -1:] = probe
        seen = before.gather(2, keys[..., None])[..., 0] & ~noisy
        values = num_keys + torch.randint(tokens - num_keys, (count, num_keys), generator=generator)
        filler = torch.randint(tokens, max(self.vocab, tokens + 1), (count, pairs, 2), generator=generator)
        clean = torch.stack([keys, values.gather(1, keys)], 2)
        inputs = torch.where(noisy[..., None], filler, clean).flatten(1)
        return Sequences(inputs, next_tokens(inputs) if train else values_of_seen_keys(inputs, seen))


@dataclass(frozen=True, kw_only=True)
class NoisyRecall(InContextRecall):
    """In-context recall in which a share ``noise`` of the pairs is replaced by noise."""

    name = "mad-noisy-recall"
    vocab: int = 32
    noise: float = 0.2
    noise_vocab: int = 16


def next_tokens(inputs: Tensor) -> Tensor:
    """Targets ``(B, T)`` of a language model: each next token, ``IGNORED`` at the last token."""
    return F.pad(inputs[:, 1:], (0, 1), value=IGNORED)


def values_of_seen_keys(inputs: Tensor, seen: Tensor) -> Tensor:
    """Targets with the value of pair i at its key, where ``seen (B, pairs)``; ``IGNORED`` elsewhere."""
    targets = torch.full_like(inputs, IGNORED)
    targets[:, ::2] = inputs[:, 1::2].masked_fill(~seen, IGNORED)
    return targets
