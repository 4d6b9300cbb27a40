"""Depo: every answer is walked to, edge by edge."""

import numpy as np
import torch

from linattn.lab.tasks.text import IGNORED, text_task

SETTINGS = {"letters": 5, "word_length": (1, 3), "nodes": 12, "hops": 6, "length": 200}


def names(task, tokens):
    """Whole names, each up to a letter that marks an end."""
    found, begun = [], ()
    for token in tokens:
        begun += (token,)
        if token > task.letters:
            found, begun = [*found, begun], ()
    return found


def read(task, tokens, targets):
    """Instances of a window as (edges, queries); a query is (k, start, answer, targets of the answer)."""
    mark, found = task.bos + 1, []
    cuts = [place for place, token in enumerate(tokens) if token >= task.bos and token != mark]
    for begin, end in zip(cuts, [*cuts[1:], len(tokens)], strict=True):
        piece = tokens[begin + 1 : end]
        if tokens[begin] == task.bos:
            found.append((names(task, piece), []))
        elif mark in piece and (answer := names(task, piece[piece.index(mark) + 1 :])):
            (start,), place = names(task, piece[: piece.index(mark)]), begin + 1 + piece.index(mark)
            found[-1][1].append((tokens[begin] - mark, start, answer[0], tuple(targets[place:][: len(answer[0])])))
    return found


def test_answers_are_where_the_edges_lead():
    task = text_task("depo", **SETTINGS)
    sizes, hops, total = set(), set(), 0
    for train in (True, False):
        batch = task.batch(3, 60, train=train)
        for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            scored = 0
            for nodes, queries in read(task, tokens, targets):
                edges = dict(zip(nodes[::2], nodes[1::2], strict=False))
                if not queries:
                    continue
                assert len(edges) == len(nodes) // 2 == len(set(edges.values()))
                assert train or len(edges) == task.nodes
                sizes.add(len(edges))
                assert len({start for _, start, _, _ in queries}) == len(queries) <= min(10, len(edges))
                seen, node = 0, nodes[0]
                while seen == 0 or node != nodes[0]:
                    seen, node = seen + 1, edges[node]
                assert seen == len(edges)  # one cycle through all
                for k, start, answer, asked in queries:
                    node = start
                    for _ in range(k):
                        node = edges[node]
                    assert node == answer
                    hops.add((train, k))
                    cut = all(target == IGNORED for target in asked)
                    assert cut or asked == answer
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
    mark = task.words.tokens + 1  # a question of k hops begins with mark + k
    asked = ((batch.inputs > mark) * torch.arange(task.length)).cummax(1).values
    far = (batch.inputs.gather(1, asked) == mark + 6) & (batch.targets != IGNORED)
    logits[far] *= -1
    found = task.metrics(task.score(logits, batch))
    assert found["accuracy_6"] == 0
    assert found["accuracy_1"] == found["accuracy_2"] == found["accuracy_4"] == 100
    total = int((batch.targets != IGNORED).sum())
    assert abs(found["accuracy"] - 100 * (1 - int(far.sum()) / total)) < 1e-9
