"""Depo: every answer is walked to, edge by edge."""

import numpy as np
import torch

from linattn.lab.tasks.text import IGNORED, text_task

SETTINGS = {"letters": 5, "word_length": (1, 3), "nodes": 12, "hops": 6, "length": 200}


def read(task, tokens, targets):
    """Instances of a window as (edges, queries); a query is (k, start, answer, targets of the answer)."""
    bos, mark = task.words.tokens, task.words.tokens + 1
    found, place = [], 0
    while place < len(tokens):
        assert tokens[place] == bos
        place, names, queries = place + 1, [], []

        def name(place):
            end = place
            while tokens[end] <= task.letters:
                end += 1
            return tuple(tokens[place : end + 1]), end + 1

        try:
            while tokens[place] < bos:
                word, place = name(place)
                names.append(word)
            while tokens[place] > mark:
                k = tokens[place] - mark
                start, place = name(place + 1)
                assert tokens[place] == mark
                answer, end = name(place + 1)
                queries.append((k, start, answer, targets[place:end]))
                place = end
        except IndexError:  # cut
            place = len(tokens)
        found.append((names, queries))
    return found


def test_answers_are_where_the_edges_lead():
    task = text_task("depo", **SETTINGS)
    sizes, hops, total = set(), set(), 0
    for train in (True, False):
        batch = task.batch(3, 60, train=train)
        for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            scored = 0
            for names, queries in read(task, tokens, targets):
                edges = dict(zip(names[::2], names[1::2], strict=False))
                if not queries:
                    continue
                assert len(edges) == len(names) // 2 == len(set(edges.values()))
                assert train or len(edges) == task.nodes
                sizes.add(len(edges))
                assert len({start for _, start, _, _ in queries}) == len(queries) <= min(10, len(edges))
                seen, node = 0, names[0]
                while seen == 0 or node != names[0]:
                    seen, node = seen + 1, edges[node]
                assert seen == len(edges)  # one cycle through all
                for k, start, answer, asked in queries:
                    node = start
                    for _ in range(k):
                        node = edges[node]
                    assert node == answer
                    hops.add((train, k))
                    cut = all(target == IGNORED for target in asked)
                    assert cut or tuple(asked[:-1]) == answer
                    scored += 0 if cut else len(answer)
                    total += 1
            marks = sum(target == task.words.tokens + 1 for target in targets)
            assert marks == 0 or train
            assert sum(target != IGNORED for target in targets) - marks >= scored
    assert sizes == set(range(3, 13))
    assert {k for train, k in hops if train} == set(range(1, 7))
    assert {k for train, k in hops if not train} == {1, 2, 4, 6}
    assert total > 500


def test_edges_come_in_random_order():
    stream = text_task("depo", letters=9, word_length=(1, 1), nodes=4, hops=1, length=64).instances(
        np.random.default_rng(0), 3000, False
    )
    rows = stream.tokens.reshape(3000, -1)
    neighbours = (rows[:, 2] == rows[:, 3]).mean()  # the second edge begins where the first one ends: 1 of 3
    assert abs(neighbours - 1 / 3) < 4 * (2 / 9 / 3000) ** 0.5


def test_accuracy_is_told_by_hops():
    task = text_task("depo", test_examples=20, **SETTINGS)
    batch = next(task.test_batches(20))
    logits = torch.nn.functional.one_hot(batch.targets.clamp(min=0), task.vocabulary) * 9.0
    far = []
    for row, (tokens, targets) in enumerate(zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)):
        k = 0
        for place, (token, target) in enumerate(zip(tokens, targets, strict=True)):
            k = token - task.words.tokens - 1 if token > task.words.tokens + 1 else k
            if k == 6 and target != IGNORED:
                far.append((row, place))
    for row, place in far:
        logits[row, place] *= -1
    found = task.metrics(task.score(logits, batch))
    assert found["accuracy_6"] == 0
    assert found["accuracy_1"] == found["accuracy_2"] == found["accuracy_4"] == 100
    total = int((batch.targets != IGNORED).sum())
    assert abs(found["accuracy"] - 100 * (1 - len(far) / total)) < 1e-9
