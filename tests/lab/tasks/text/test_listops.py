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
    ((whole,),) = stack
    return whole, deepest, counts


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
        assert 2 <= min(counts) <= max(counts) <= 10
        lengths.append(len(words))
        operators |= {word for word in words if word.startswith("[")}
    assert operators == set(RULES)
    assert 500 < min(lengths) < 900
    assert 1200 < max(lengths) < 2000


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


def test_impossible_settings_say_so():
    with pytest.raises(ValueError, match="change these settings"):
        text_task("listops", depth=2, branching=0.01, arguments=(2, 3)).batch(0, 1)
