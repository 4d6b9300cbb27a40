"""ListOps: expressions are read by a parser of its own, and their shape is that of the grammar."""

from statistics import median

import pytest
import torch

from linattn.lab.tasks.text import text_task
from linattn.lab.tasks.text.arena import TOKENS

RULES = {"[MIN": min, "[MAX": max, "[MED": lambda v: int(median(v)), "[SM": lambda v: sum(v) % 10}


def parse(words):
    """Value, depth, and the numbers of arguments, of a whole expression."""
    stack, counts, deepest = [[]], [], 1
    for word in words:
        if word.startswith("["):
            stack.append([word])
            deepest = max(deepest, len(stack))
        elif word == "]":
            name, *values = stack.pop()
            counts.append(len(values))
            stack[-1].append(RULES[name](values))
        else:
            stack[-1].append(int(word))
    assert len(stack) == 1
    assert len(stack[0]) == 1
    return stack[0][0], deepest, counts


def expressions(batch):
    for tokens, mask in zip(batch.inputs.tolist(), batch.key_mask.tolist(), strict=True):
        size = sum(mask)
        assert tokens[size:] == [0] * (len(tokens) - size)
        assert 0 not in tokens[:size]
        yield [TOKENS[token] for token in tokens[:size]]


def test_answers_are_those_of_a_parser():
    batch = text_task("listops").batch(0, 40)
    operators, lengths = set(), []
    for words, answer in zip(expressions(batch), batch.targets.tolist(), strict=True):
        value, depth, counts = parse(words)
        assert value == answer
        assert depth <= 10
        assert min(counts) >= 2
        assert max(counts) <= 10
        lengths.append(len(words))
        operators |= {word for word in words if word.startswith("[")}
    assert operators == set(RULES)
    assert min(lengths) > 500
    assert max(lengths) < 2000
    assert max(lengths) > 1200
    assert min(lengths) < 900


def test_the_chances_are_those_of_the_grammar():
    """Of short trees, kept whole: a root is an operator, its arguments' number is uniform, and so is its kind."""
    batch = text_task("listops", shortest=1, length=200, depth=2, branching=0.5).batch(0, 3000)
    kinds, counts, digits = torch.zeros(4), torch.zeros(11), torch.zeros(10)
    for words in expressions(batch):
        kinds[list(RULES).index(words[0])] += 1
        counts[len(words) - 2] += 1
        for word in words[1:-1]:
            digits[int(word)] += 1
    assert (kinds / 3000 - 0.25).abs().max() < 0.04
    assert counts[:2].sum() == 0
    assert (counts[2:] / 3000 - 1 / 9).abs().max() < 0.03
    assert (digits / digits.sum() - 0.1).abs().max() < 0.01


def test_the_limit_of_length_cuts_nothing_short():
    """What is kept under a limit is what would be kept of whole trees: sizes are exact at the border."""
    batch = text_task("listops", shortest=20, length=26, depth=6).batch(0, 200)
    sizes = {len(words) for words in expressions(batch) if parse(words)}
    assert sizes == {21, 22, 23, 24, 25}


def test_impossible_settings_say_so():
    with pytest.raises(ValueError, match="change these settings"):
        text_task("listops", depth=2, branching=0.01, arguments=(2, 3)).batch(0, 1)
