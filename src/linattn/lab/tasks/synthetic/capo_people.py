"""People with names and facts, and sentences about them."""

from math import prod
from typing import NamedTuple

import numpy as np

from linattn.lab.tasks.synthetic.ragged import Flags, Ints, below

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
SCORED = {"name": (FIRST_ID["first"], FIRST_ID["pronoun"])}  # ids of names
FIRST_NAME = (FIRST_ID["first"], FIRST_ID["middle"])
# For each sentence: what it starts with, and what it tells. The last fact follows from the employer.
SENTENCES = ((NAMES, ("month", "day", "year")), *((("pronoun",), (kind,)) for kind in
             ("city", "university", "major", "employer", "work city")))  # fmt: skip
WORDS = 5  # fillers of a sentence
TOKENS = 1 + FILLERS + sum(KINDS.values())
LENGTH = 1 + sum(len(start) + WORDS + len(told) for start, told in SENTENCES)  # tokens of one person


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
