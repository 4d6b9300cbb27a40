"""Lano: chances agree with enumeration and with the sentences that are drawn."""

from itertools import product
from math import log

import numpy as np
import pytest
import torch

from linattn.lab.tasks.synthetic.lano import grammar, mean_length, next_chances, random_sentences
from linattn.lab.tasks.text import IGNORED, text_task


def language(rules, symbol):
    """Every sentence with its chance."""
    if symbol not in rules:
        return {(symbol,): 1.0}
    found = {}
    for rule in rules[symbol]:
        for parts in product(*(language(rules, part).items() for part in rule)):
            sentence = sum((words for words, _ in parts), ())
            chance = float(np.prod([chance for _, chance in parts])) / len(rules[symbol])
            found[sentence] = found.get(sentence, 0) + chance
    return found


def test_grammars_are_as_long_as_the_papers():
    for name, mean in (("cfg3f", 249), ("cfg3j", 545), ("cfg3k", 515)):
        rules = grammar(name)
        assert abs(mean_length(rules) - mean) < 3
        assert all(len({len(rule) for rule in found}) <= 2 for found in rules.values())


def test_chances_are_those_of_all_derivations():
    every, task = language(grammar("cfg3f"), 12), text_task("lano", root=12, length=64)
    assert sum(every.values()) == pytest.approx(1)
    for sentence in product((1, 2, 3), repeat=5):
        assert task.valid(list(sentence)) == (sentence in every)
    assert not task.valid([])
    for sentence in list(every)[::40]:
        found = next_chances(task.rules, sentence)
        for size in range(len(sentence) + 1):
            begun = {s: c for s, c in every.items() if s[:size] == sentence[:size]}
            expected = np.zeros(4)
            for whole, chance in begun.items():
                expected[whole[size] if size < len(whole) else 0] += chance
            assert np.allclose(found[size], expected / expected.sum())


@pytest.mark.parametrize(("name", "root"), [("cfg3f", 22), ("cfg3k", 16)])
def test_drawn_sentences_are_valid_and_corrupted_ones_are_not(name, root):
    task, rng = text_task("lano", grammar=name, root=root), np.random.default_rng(0)
    symbols, of = random_sentences(rng, task.rules, 6)
    rejected = 0
    for number in range(6):
        sentence = symbols[of == number].tolist()
        assert task.valid(sentence)
        for place in rng.integers(len(sentence) - 1, size=6):
            before, after = sentence[:place], sentence[place + 1 :]
            rejected += not task.valid([*before, sentence[place] % 3 + 1, *after])
            rejected += not task.valid(before + after)
    assert rejected > 0.7 * 6 * 12


def test_rules_are_chosen_alike():
    symbols, of = random_sentences(np.random.default_rng(0), grammar("cfg3f", 9), 3000)
    found = [tuple(part) for part in np.split(symbols, np.nonzero(np.diff(of))[0] + 1)]
    counts = [found.count(rule) for rule in ((1, 2, 1), (3, 3), (1, 1))]
    assert sum(counts) == 3000
    assert max(abs(count - 1000) for count in counts) < 4 * (3000 * 2 / 9) ** 0.5


def test_a_model_of_the_truth_has_no_divergence():
    task = text_task("lano", root=13, length=60, test_examples=30)
    batch = next(task.test_batches(30))
    scored = batch.targets != IGNORED
    found = task.metrics(task.score(batch.exact.clamp(min=1e-12).log(), batch))
    assert found["kl"] == pytest.approx(0, abs=1e-6)
    assert found["legal"] == 100
    chance = batch.exact.gather(-1, batch.targets.clamp(min=0)[..., None])[..., 0][scored]
    assert found["loss"] == pytest.approx(float(-chance.log().mean()), rel=1e-5)
    flat = task.metrics(task.score(torch.zeros(30, 60, 4), batch))
    exact = batch.exact[scored].double()
    assert flat["kl"] == pytest.approx(log(4) + float(torch.special.xlogy(exact, exact).sum()) / len(exact), rel=1e-5)
