"""A needle in a long text, as bytes (RULER, arXiv:2404.06654): a number to be repeated at the end."""

from dataclasses import dataclass
from random import Random
from re import finditer

import torch
from torch import Tensor

from linattn.convert.evaluate.needles import ADJECTIVES, NOUNS, SENTENCES
from linattn.lab.tasks.text.generated import GeneratedTask, python_random, require
from linattn.lab.tasks.text.task import IGNORED, Sequences
from linattn.support.config import option
from linattn.support.documents import as_bytes


@dataclass(frozen=True, kw_only=True)
class Passkey(GeneratedTask):
    """Filler that repeats five sentences, among them one with a number, and at the end a question and its answer.

    ``... One of the special magic numbers for calm-harbor is: 4817205. ... The special magic number for calm-harbor
    mentioned in the provided text is: 4817205``. The digits at the end are scored, each given those before it;
    ``exact_match`` counts the sequences with all of them right. Every sequence has ``length`` bytes, so the filler may
    begin in the middle of a sentence.
    """

    name = "passkey"
    kind = "causal"
    metric = "exact_match"
    vocabulary = 256
    length: int = option(1024, "Bytes of a sequence.")
    digits: int = option(7, "Digits of the number.", least=1)
    test_examples: int = option(500, "Test sequences.", least=1)

    def check(self) -> None:
        low = 250 + 2 * self.digits
        require("length", self.length >= low, f"at least {low}, the needle, the question and some filler", self.length)

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        random = python_random(generator)
        # One byte more than the input: the last digit is only a target.
        tokens = torch.stack([as_bytes(self.text(random, self.length + 1)) for _ in range(count)]).long()
        targets = tokens[:, 1:].clone()
        targets[:, : -self.digits] = IGNORED
        return Sequences(tokens[:, :-1], targets)

    def text(self, random: Random, size: int) -> str:
        """``size`` characters, one byte each."""
        key = f"{random.choice(ADJECTIVES)}-{random.choice(NOUNS)}"
        number = "".join(random.choice("0123456789") for _ in range(self.digits))
        needle = f"One of the special magic numbers for {key} is: {number}. "
        question = f"The special magic number for {key} mentioned in the provided text is: {number}"
        room, turn = size - len(needle) - len(question), "".join(SENTENCES)
        filler = (turn * (room // len(turn) + 1))[-room:]
        place = random.choice([end.end() for end in finditer(r"\. ", filler)])
        return filler[:place] + needle + filler[place:] + question

    def answers(self, batch: Sequences) -> Tensor:
        return torch.zeros_like(batch.targets)
