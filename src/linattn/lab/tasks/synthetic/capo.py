"""Capo: how much a model can know, by repeated facts about people (Physics of Language Models 3.3 and 4.1)."""

from dataclasses import dataclass
from math import log, log2, prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from linattn.lab.tasks.synthetic.packed import Flags, Ints, below, numpy_random, windows
from linattn.lab.tasks.text.generated import GeneratedTask, require
from linattn.lab.tasks.text.task import IGNORED, Sequences, Sums, flattened, mean, once, shuffled_batch
from linattn.support.config import option
from linattn.support.seeds import stream

FILLERS = 200
# Kinds of tokens, in the order of their ids after bos = 0 and the fillers, and the number of each.
KINDS = {
    "first": 400, "middle": 400, "last": 1000, "pronoun": 2, "month": 12, "day": 28, "year": 200, "city": 200,
    "university": 300, "major": 100, "employer": 263,
}  # fmt: skip
_ENDS = dict(zip(KINDS, 1 + FILLERS + np.cumsum(list(KINDS.values())), strict=True))
FIRST_ID = {kind: int(end) - KINDS[kind] for kind, end in _ENDS.items()}
NAMES = ("first", "middle", "last")
FACTS = tuple(kind for kind in KINDS if kind not in NAMES)
SIZES = {"names": prod(KINDS[kind] for kind in NAMES), "facts": prod(KINDS[kind] for kind in FACTS)}
# For each sentence: what it starts with, and what it tells. The last fact follows from the employer.
SENTENCES = ((NAMES, ("month", "day", "year")), *((("pronoun",), (kind,)) for kind in
             ("city", "university", "major", "employer", "work city")))  # fmt: skip
WORDS = 5  # fillers of a sentence
TOKENS = 1 + FILLERS + sum(KINDS.values())
LENGTH = 1 + sum(len(start) + WORDS + len(told) for start, told in SENTENCES)  # tokens of one person


@dataclass(frozen=True, kw_only=True)
class Capo(GeneratedTask):
    """``bos first middle last ... month day year ... pronoun ... city ...``: six sentences on each of N people.

    Names and facts are drawn once, from as many as in bioS: 400 x 400 x 1000 names; 12 x 28 x 200 birthdays, 200
    cities, 300 universities, 100 majors, 263 employers, each with a fixed city, 2 pronouns. Each sentence has
    ``templates`` templates, one of which is chosen anew each time. Templates are random words, and each part of a name
    or fact is one token: the English templates of the paper and its tokenizer are not used.

    An epoch has everybody once. Training is on all tokens; a test scores names and facts. With ``p_name`` and
    ``p_fact`` the nats that a model needs for one person's name and facts,

        bits = N log2(N0 / e^p_name) + N log2(S0 / e^p_fact),    at best N log2(N0 S0 / N),

    where N0 is the number of all names and S0 that of all combinations of facts. ``bits`` is what the weights know, and
    the capacity is ``bits`` divided by the number of weights. ``share`` is the percentage of the best ``bits``.
    """

    name = "capo"
    kind = "causal"
    metric = "bits"
    vocabulary = TOKENS
    people: int = option(50_000, "N, the number of people.", least=1)
    templates: int = option(50, "Templates of each of the six sentences.", least=1)
    people_seed: int = option(0, "Seed of names and facts; data_seed is that of order and templates.")
    length: int = option(512, f"Tokens of a window, which holds length // {LENGTH} people.", least=LENGTH)
    test_examples: int = option(256, "Test sequences.", least=1)

    def check(self) -> None:
        require("train_examples", self.train_examples is None, "left out: people decide how many", self.train_examples)

    @once
    def known(self) -> "People":
        return People.drawn(numpy_random(stream("people", self.people_seed)), self.people, self.templates)

    @property
    def each(self) -> int:
        """Number of people in a window."""
        return self.length // LENGTH

    def train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        who = shuffled_batch(self.people, batch_size * self.each, seed, step).numpy()
        return self._told(numpy_random(stream("train", self.data_seed, seed, step)), who, True)

    def draw(self, generator: torch.Generator, count: int, train: bool) -> Sequences:
        rng = numpy_random(generator)
        number = count * self.each
        who = rng.choice(self.people, number, replace=number > self.people)
        return self._told(rng, who, train)

    def _told(self, rng: np.random.Generator, who: Ints, train: bool) -> Sequences:
        tokens, scored = self.known.told(rng, who)
        rows = np.zeros((len(who) // self.each, self.length + 1), np.int64)  # bos ends the last person
        asked = np.zeros(rows.shape, np.bool_)
        end = self.each * LENGTH
        rows[:, :end] = tokens.reshape(len(rows), end)
        asked[:, :end] = True if train else scored.reshape(len(rows), end)
        asked[:, end] = train
        return windows(rows, asked)

    @torch.no_grad()
    def score(self, logits: Tensor, batch: Sequences) -> dict[str, Tensor]:
        sums = super().score(logits, batch)
        flat, targets = flattened(logits, batch)
        nats = F.cross_entropy(flat.float(), targets, ignore_index=IGNORED, reduction="none").double()
        first, middle, behind = (FIRST_ID[kind] for kind in ("first", "middle", "pronoun"))
        sums["told"] = ((targets >= first) & (targets < middle)).sum().double()
        sums["name"] = nats[(targets >= first) & (targets < behind)].sum()
        sums["fact"] = sums["nats"] - sums["name"]
        return sums

    @property
    def best_bits(self) -> float:
        """The bits of all there is to know: which names there are, and every fact."""
        return self.people * (log2(SIZES["names"]) + log2(SIZES["facts"]) - log2(self.people))

    def metrics(self, sums: Sums) -> dict[str, float]:
        name, fact = (mean(sums, part, "told") / log(2) for part in ("name", "fact"))
        bits = self.people * (log2(SIZES["names"]) - name + log2(SIZES["facts"]) - fact)
        return super().metrics(sums) | {"bits": bits, "share": 100 * bits / self.best_bits}


class People(NamedTuple):
    """N people: ``facts`` has a token of each kind for each person; the other fields are the templates of sentences."""

    facts: dict[str, Ints]
    fillers: Ints
    """``(6, templates, 5)``: the words of each template."""
    before: Ints
    """``(6, templates)``: how many fillers come before the fact."""

    @classmethod
    def drawn(cls, rng: np.random.Generator, number: int, templates: int) -> "People":
        """Draw people with different names; everything else is drawn for each person independently."""
        codes = np.unique(rng.integers(0, SIZES["names"], number))
        while len(codes) < number:
            codes = np.unique(np.append(codes, rng.integers(0, SIZES["names"], number - len(codes))))
        codes = rng.permutation(codes)
        facts = {
            "first": codes // (KINDS["middle"] * KINDS["last"]),
            "middle": codes // KINDS["last"] % KINDS["middle"],
            "last": codes % KINDS["last"],
        }
        facts |= {kind: below(rng, np.full(number, KINDS[kind])) for kind in FACTS}
        facts = {kind: FIRST_ID[kind] + values for kind, values in facts.items()}
        office = FIRST_ID["city"] + below(rng, np.full(KINDS["employer"], KINDS["city"]))
        facts["work city"] = office[facts["employer"] - FIRST_ID["employer"]]
        fillers = 1 + rng.integers(0, FILLERS, (len(SENTENCES), templates, WORDS))
        return cls(facts, fillers, rng.integers(1, WORDS + 1, (len(SENTENCES), templates)))

    def told(self, rng: np.random.Generator, who: Ints) -> tuple[Ints, Flags]:
        """Tokens ``(P, 47)`` about people ``who (P,)``, and which of them are names and facts not told before."""
        tokens, scored = np.zeros((len(who), LENGTH), np.int64), np.zeros((len(who), LENGTH), np.bool_)
        at = 1
        for number, (start, kinds) in enumerate(SENTENCES):
            for kind in start:
                tokens[:, at] = self.facts[kind][who]
                scored[:, at] = number < 2  # the first pronoun is new, later ones repeat it
                at += 1
            which = rng.integers(0, self.fillers.shape[1], len(who))
            fillers, before = self.fillers[number, which], self.before[number, which][:, None]
            told = np.stack([self.facts[kind][who] for kind in kinds], 1)
            places = np.arange(WORDS + len(kinds))
            inner = (places >= before) & (places < before + len(kinds))
            filler = np.take_along_axis(fillers, np.where(places < before, places, places - len(kinds)) % WORDS, 1)
            value = np.take_along_axis(told, np.clip(places - before, 0, len(kinds) - 1), 1)
            span = slice(at, at + len(places))
            tokens[:, span], scored[:, span] = np.where(inner, value, filler), inner & (number < len(SENTENCES) - 1)
            at += len(places)
        return tokens, scored
