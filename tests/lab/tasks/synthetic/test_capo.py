"""Capo: everybody keeps their facts, however they are told, and bits are counted as the formula says."""

from dataclasses import replace
from math import log, log2

import pytest
import torch

from linattn.lab.tasks.synthetic.capo import FIRST_ID, KINDS, LENGTH, NAMES
from linattn.lab.tasks.text import IGNORED, text_task

ORDER = (*NAMES, "month", "day", "year", "pronoun", "city", "university", "major", "employer")
TOLD = "first middle last month day year pronoun city pronoun university pronoun major pronoun employer pronoun city"


def kind_of(token):
    return next((kind for kind, first in FIRST_ID.items() if first <= token < first + KINDS[kind]), None)


def told(batch):
    """Facts of each person in the order they are told, fillers left out."""
    for row in batch.inputs.reshape(-1, LENGTH).tolist():
        assert row[0] == 0
        yield [(kind_of(token), token) for token in row[1:] if kind_of(token)]


@pytest.fixture(scope="module")
def task():
    return text_task("capo", people=40, length=2 * LENGTH, test_examples=20)


def test_facts_stay_and_ways_of_telling_change(task):
    known, offices = {}, {}
    batches = [task.train_batch(5, 0, step) for step in range(12)]
    for batch in batches:
        for facts in told(batch):
            assert " ".join(kind for kind, _ in facts) == TOLD
            name = tuple(token for _, token in facts[:3])
            assert known.setdefault(name, facts) == facts
            assert offices.setdefault(facts[-3][1], facts[-1][1]) == facts[-1][1]
    assert len(known) == 40
    assert len({tuple(row) for batch in batches for row in batch.inputs.tolist()}) == 60
    assert torch.equal(batches[0].targets[:, :-1], batches[0].inputs[:, 1:])


def test_what_is_new_is_scored_once(task):
    batch = task.batch(0, 20)
    for row in batch.targets.reshape(-1, LENGTH).tolist():
        assert [kind_of(token) for token in row if token != IGNORED] == list(ORDER)
    held = replace(task, data_seed=1)  # other tellings of the same people
    names = {tuple(t for _, t in facts[:3]) for facts in told(held.batch(0, 20))}
    assert names == {tuple(t for _, t in facts[:3]) for facts in told(batch)}
    assert not torch.equal(next(held.test_batches(20)).inputs, next(task.test_batches(20)).inputs)


def test_bits_are_what_the_formula_says(task):
    batch = next(task.test_batches(20))
    right = torch.nn.functional.one_hot(batch.targets.clamp(min=0), task.vocabulary).float()
    alike = torch.full_like(right, -1e4)  # of every kind all tokens alike
    for place in (batch.targets != IGNORED).nonzero().tolist():
        kind = kind_of(int(batch.targets[tuple(place)]))
        alike[place[0], place[1], FIRST_ID[kind] : FIRST_ID[kind] + KINDS[kind]] = 0
    nothing = task.metrics(task.score(alike, batch))
    assert nothing["bits"] == pytest.approx(0, abs=1e-2)
    names = 400 * 400 * 1000
    facts = 2 * (12 * 28 * 200) * 200 * 300 * 100 * 263
    everything = task.metrics(task.score(right * 1e4, batch))
    assert everything["bits"] == pytest.approx(40 * (log2(names) + log2(facts)))
    # The first token of a name at a chance of 1/40 and all else known: all there is to know.
    best = right * 1e4
    first = (batch.targets >= FIRST_ID["first"]) & (batch.targets < FIRST_ID["middle"])
    width = task.vocabulary
    best[first] = torch.where(right[first] > 0, log(1 / 40), log(39 / 40 / (width - 1)))
    found = task.metrics(task.score(best, batch))
    assert found["bits"] == pytest.approx(task.best_bits, rel=1e-5)
    assert found["share"] == pytest.approx(100, rel=1e-5)
