"""Brevo: graphs keep their limits, answers are sorted, and any right order is accepted."""

import numpy as np
import pytest
import torch

from linattn.lab.tasks.synthetic.brevo import random_graphs, right_answer
from linattn.lab.tasks.text import IGNORED, Sequences, text_task

NAMES = {"one token": {}, "words": {"letters": 3, "word_length": (2, 3), "length": 250}}


def instances(task, batch):
    """(edges, query, answer) of every whole instance, by names."""
    bos = task.bos
    for tokens in batch.inputs.tolist():
        text = " ".join(map(str, tokens))
        for part in text.split(f"{bos}")[1:]:
            if f" {bos + 3}" not in part:
                continue
            edges, rest = part.split(f" {bos + 1} ")
            query, answer = rest.split(f" {bos + 2} ")
            words = []
            for piece in (edges, query, answer.split(f" {bos + 3}")[0]):
                names, begun = [], ()
                for token in map(int, piece.split()):
                    begun += (token,)
                    if task.words.longest == 1 or token > task.words.letters:
                        names, begun = [*names, begun], ()
                assert not begun
                words.append(names)
            yield list(zip(words[0][::2], words[0][1::2], strict=True)), words[1][0], words[2]


def ancestors(edges, query):
    needed, old = {query}, set()
    while needed != old:
        old, needed = needed, needed | {p for p, c in edges if c in needed}
    return needed


def orders(edges, query):
    """All right orders, by trying."""
    needed, done = ancestors(edges, query), [[]]
    for _ in needed:
        done = [[*o, n] for o in done for n in needed - set(o) if all(p in o for p, c in edges if c == n)]
    return done


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("source", ["paper", "released"])
def test_answers_are_all_ancestors_in_a_right_order(kind, source):
    task = text_task("brevo", **{"nodes": 9, "length": 120, "source": source} | NAMES[kind])
    with_children = count = 0
    for train in (True, False):
        for edges, query, answer in instances(task, task.batch(1, 80, train=train)):
            parents, children = {}, {}
            for parent, child in edges:
                parents.setdefault(child, []).append(parent)
                children.setdefault(parent, []).append(child)
            assert all(len(set(p)) == len(p) <= 4 for p in [*parents.values(), *children.values()])
            assert sorted(answer) == sorted(ancestors(edges, query))
            assert answer[-1] == query
            assert all(answer.index(p) < answer.index(name) for name in answer for p in parents.get(name, []))
            with_children += query in children
            count += 1
    assert count > 100
    assert (with_children > 0) == (source == "paper")


def test_graphs_keep_their_limits():
    sizes = np.random.default_rng(1).integers(3, 21, 600)
    graphs = random_graphs(np.random.default_rng(0), sizes)
    assert np.array_equal(graphs.sizes, sizes)
    counts = (graphs.parents >= 0).sum(-1)
    assert set(counts.flatten().tolist()) == {0, 1, 2, 3, 4}
    leaves = set()
    for size, own in zip(sizes, counts.tolist(), strict=True):
        number = next((i for i, count in enumerate(own) if count), size)
        assert all(own[number:size])  # every node behind the leaves has a parent
        assert not any(own[size:])
        leaves |= {number} if size == 20 else set()
    assert leaves == {1, 2, 3, 4, 5}  # (20 - 1) // 4 + 1


@pytest.mark.parametrize("kind", NAMES)
def test_legal_tokens_are_those_of_some_right_answer(kind):
    """All right answers of an instance, by trying: the next tokens after each beginning are the legal ones."""
    task = text_task("brevo", **{"nodes": 5, "length": 60} | NAMES[kind])
    batch = task.batch(4, 12)
    scored = batch.targets != IGNORED
    assert torch.allclose(batch.exact.sum(-1)[scored], torch.ones(int(scored.sum())))
    assert not batch.exact[~scored].any()
    for tokens, targets, exact in zip(batch.inputs.tolist(), batch.targets.tolist(), batch.exact, strict=True):
        begins = [place for place, token in enumerate(tokens) if token == task.bos]
        for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
            if all(target == IGNORED for target in targets[begin:end]):
                continue
            first = tokens.index(task.bos + 2, begin)
            answer = [target for target in targets[begin:end] if target != IGNORED]
            alone = Sequences(torch.tensor([tokens[begin : first + 1] + answer]), torch.empty(0))
            ((edges, query, _),) = instances(task, alone)
            every = [[token for name in order for token in name] for order in orders(edges, query)]
            for step in range(len(answer)):
                following = {[*row, task.bos + 3][step] for row in every if row[:step] == answer[:step]}
                assert set(exact[first + step].nonzero()[:, 0].tolist()) == following
            assert all(right_answer(tokens[begin : first + 1], row, task.words, task.bos) for row in every)
            assert not right_answer(tokens[begin : first + 1], every[0][:-1], task.words, task.bos)
            assert not right_answer(tokens[begin : first + 1], every[0] * 2, task.words, task.bos)


def test_another_right_order_counts_and_a_wrong_token_does_not():
    task = text_task("brevo", nodes=8, length=120)
    batch = task.batch(0, 20)
    other = batch.exact + torch.nn.functional.one_hot(batch.targets.clamp(min=0), task.vocabulary) * -0.001
    found = task.metrics(task.score(other, batch))  # of tokens that are as likely, another one than was drawn
    assert found["exact_match"] == found["legal"] == 100
    assert found["accuracy"] < 95
    total = int(task.score(other, batch)["answers"])
    row, place = (batch.targets != IGNORED).nonzero()[0].tolist()
    other[row, place] = torch.nn.functional.one_hot(torch.tensor(0), task.vocabulary)
    assert task.metrics(task.score(other, batch))["exact_match"] == pytest.approx(100 * (total - 1) / total)
    questions = task.questions(5)
    assert all(row[0] == task.bos and row[-1] == task.bos + 2 for row in questions)
