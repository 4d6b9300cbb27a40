"""Mano: values are computed again, by recursion on the tokens."""

import torch

from linattn.lab.tasks.text import IGNORED, text_task


def value(task, tokens):
    """Of the expression at the front of ``tokens``, and how many of them it takes."""
    code = tokens[0]
    if code < task.modulus:
        return code, 1
    left, first = value(task, tokens[1:])
    right, second = value(task, tokens[1 + first :])
    operation = "+-*"[(code - task.modulus) % 3]
    return eval(f"({left} {operation} {right}) % {task.modulus}"), 1 + first + second


def test_values_are_those_of_the_expressions():
    task = text_task("mano", operations=6, length=100)
    sizes, seen = set(), set()
    for train in (True, False):
        batch = task.batch(2, 60, train=train)
        for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            place, scored = 0, 0
            while place < len(tokens):
                assert tokens[place] in (task.first_mark, task.first_mark + 1)
                if place + 1 == len(tokens):
                    break
                size = (tokens[place + 1] - task.first_mark) // 2
                end = place + 2 * size + 3
                if end + 1 >= len(tokens):
                    assert train or all(t == IGNORED for t in targets[place : end - 1])
                    break
                result, used = value(task, tokens[place + 2 :])
                assert used == 2 * size + 1
                assert (tokens[end] - task.first_answer) // 2 == size - 1
                assert tokens[end + 1] == targets[end] == result
                assert train or size == 6
                sizes.add(size)
                seen |= set(tokens[place : end + 2])
                place, scored = end + 2, scored + 1
            if train:
                assert targets[:-1] == tokens[1:]
            else:
                assert scored <= sum(target != IGNORED for target in targets) <= scored + 1
    assert sizes == {1, 2, 3, 4, 5, 6}
    assert seen == set(range(task.vocabulary))  # every token, its synonyms too


def test_left_parts_are_of_every_size_alike_and_synonyms_can_be_left_out():
    task = text_task("mano", operations=3, synonyms=False, length=11 * 40)
    rows = task.batch(0, 100).inputs.reshape(-1, 11).tolist()
    sizes = [value(task, row[3:])[1] // 2 for row in rows]
    assert max(abs(sizes.count(left) - 4000 / 3) for left in range(3)) < 4 * (4000 * 2 / 9) ** 0.5
    assert {row[0] for row in rows} == {task.first_mark}
    assert not torch.isin(torch.tensor(rows), torch.arange(26, 29)).any()
