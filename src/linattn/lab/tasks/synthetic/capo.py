"""Capo: how much a model can know, by repeated facts about people (Physics of Language Models 3.3 and 4.1)."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, log2

import numpy as np
import torch
from torch import Tensor

from linattn.lab.tasks.synthetic.capo_people import FIRST_NAME, LENGTH, SCORED, SIZES, TOKENS, People
from linattn.lab.tasks.synthetic.packed import numpy_random
from linattn.lab.tasks.synthetic.ragged import Ints
from linattn.lab.tasks.text.batch import IGNORED, Sequences
from linattn.lab.tasks.text.checks import at_least, require
from linattn.lab.tasks.text.generated import GeneratedTask
from linattn.lab.tasks.text.once import once
from linattn.lab.tasks.text.order import shuffled_batch
from linattn.support.seeds import stream


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

    Args:
        people: N.
        templates: templates of each of the six sentences.
        people_seed: seed of names and facts; ``data_seed`` is that of order and templates.
        length: tokens of a window, which holds ``length // 47`` people.
    """

    name = "capo"
    kind = "causal"
    metric = "bits"
    people: int = 50_000
    templates: int = 50
    people_seed: int = 0
    length: int = 512
    test_examples: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("people", self.people, 1)
        at_least("templates", self.templates, 1)
        require("train_examples", self.train_examples is None, "left out: people decide how many", self.train_examples)
        require("length", self.length >= LENGTH, f"at least {LENGTH}", self.length)

    @once
    def known(self) -> People:
        return People.drawn(numpy_random(stream("people", self.people_seed)), self.people, self.templates)

    @property
    def vocabulary(self) -> int:
        return TOKENS

    @property
    def each(self) -> int:
        """Number of people in a window."""
        return self.length // LENGTH

    def train_batch(self, batch_size: int, seed: int, step: int) -> Sequences:
        at_least("batch_size", batch_size, 1)
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
        asked[:, 1 : end + 1] = True if train else scored.reshape(len(rows), end)[:, [*range(1, end), 0]]
        targets = np.where(asked[:, 1:], rows[:, 1:], IGNORED)
        return Sequences(torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(targets))

    @torch.no_grad()
    def score(self, logits: Tensor, batch: Sequences) -> dict[str, Tensor]:
        sums = super().score(logits, batch)
        flat, targets = self._rows(logits, batch)
        nats = torch.nn.functional.cross_entropy(flat.float(), targets, ignore_index=IGNORED, reduction="none").double()
        low, high = SCORED["name"]
        named = (targets >= low) & (targets < high)
        first, last = FIRST_NAME
        sums["told"] = ((targets >= first) & (targets < last)).sum().double()
        sums["name"] = nats[named].sum()
        sums["fact"] = sums["nats"] - sums["name"]
        return sums

    @property
    def best_bits(self) -> float:
        """The bits of all there is to know: which names there are, and every fact."""
        return self.people * (log2(SIZES["names"]) + log2(SIZES["facts"]) - log2(self.people))

    def metrics(self, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        told = max(float(sums["told"]), 1.0)
        name, fact = float(sums["name"]) / told / log(2), float(sums["fact"]) / told / log(2)
        bits = self.people * (log2(SIZES["names"]) - name + log2(SIZES["facts"]) - fact)
        return super().metrics(sums) | {"bits": bits, "share": 100 * bits / self.best_bits}
