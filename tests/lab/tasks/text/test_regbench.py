"""RegBench: words are followed through their automaton, and automata are told apart by what they allow."""

import torch

from linattn.lab.tasks.text import IGNORED, text_task
from linattn.lab.tasks.text.regbench import RegBench, canonical, random_automata
from linattn.support.seeds import as_generator

SETTINGS = {"words": (3, 5), "word_length": (1, 12)}


def test_automata_keep_their_limits():
    tables = random_automata(as_generator(0), 200, RegBench())
    edges, letters, nodes = set(), set(), set()
    for table in tables.tolist():
        rows = [{symbol: to for symbol, to in enumerate(row) if to >= 0} for row in table]
        size = sum(bool(row) for row in rows)
        assert all(rows[:size]), "those without an edge come last"
        for node, row in enumerate(rows[:size]):
            assert len(set(row.values())) == len(row)
            assert set(row.values()) <= set(range(size)) - {node}
            edges.add(len(row))
        nodes.add(size)
        letters.add(len({symbol for row in rows for symbol in row}))
    assert edges == {1, 2, 3}
    assert nodes == set(range(4, 13))
    assert min(letters) <= 4 < 12 < max(letters)


def test_every_word_is_allowed_and_the_exact_chances_are_those_of_its_nodes():
    task = text_task("regbench", **SETTINGS)
    tables = task.automata(as_generator(1), 20, train=False)
    batch = task.sequences(as_generator(2), tables, exact=True)
    columns = (values.tolist() for values in (tables, batch.inputs, batch.targets, batch.key_mask))
    for table, tokens, targets, mask, exact in zip(*columns, batch.exact, strict=True):
        real = tokens[: sum(mask)]
        assert mask == [True] * len(real) + [False] * (len(mask) - len(real))
        assert set(tokens[len(real) :]) <= {19}
        words = " ".join(map(str, real)).split(" 18 ")
        assert 3 <= len(words) <= 5
        assert all(1 <= len(word.split()) <= 12 for word in words)
        node = 0
        for place, token in enumerate(real):
            node = 0 if token == 18 else table[node][token]
            assert node >= 0
            following = real[place + 1] if place + 1 < len(real) else 18
            assert targets[place] == (following if following != 18 else IGNORED)
            if targets[place] != IGNORED:
                allowed = [symbol for symbol, to in enumerate(table[node]) if to >= 0]
                expected = torch.zeros(20)
                expected[allowed] = 1 / len(allowed)
                assert torch.allclose(exact[place], expected)


def test_steps_are_uniform_over_what_is_allowed():
    table = torch.full((1, 4, 18), -1)
    table[0, 0, 3], table[0, 0, 5], table[0, 1, 7], table[0, 2, 3] = 1, 2, 0, 0
    task = text_task("regbench", words=(2000, 2000), word_length=(1, 1))
    first = task.sequences(as_generator(0), table, exact=False).inputs[0, ::2]
    assert set(first.tolist()) == {3, 5}
    assert abs((first == 3).double().mean() - 0.5) < 4 * 0.5 / 2000**0.5


def language(table, depth):
    """All allowed words up to ``depth``, by trying."""
    words, ends = set(), {(): 0}
    for _ in range(depth):
        ends = {(*word, s): to for word, node in ends.items() for s, to in enumerate(table[node]) if to >= 0}
        words |= set(ends)
    return words


def test_the_canonical_form_is_equal_where_the_allowed_words_are():
    """Two automata of at most n nodes that allow the same words of n + n symbols are the same."""
    generator = as_generator(3)
    small = RegBench(symbols=3, nodes=(2, 4), alphabet=(2, 2), edges=(1, 1))
    tables = random_automata(generator, 120, small).tolist()
    forms, words = [canonical(table) for table in tables], [language(table, 8) for table in tables]
    equal = 0
    for a in range(len(tables)):
        for b in range(a):
            assert (forms[a] == forms[b]) == (words[a] == words[b])
            equal += forms[a] == forms[b]
    assert 0 < equal < 119 * 60


def test_no_test_automaton_is_trained_on():
    task = text_task("regbench", symbols=4, nodes=(3, 3), alphabet=(2, 3), edges=(1, 1))
    train = {canonical(table) for table in task.automata(as_generator(0), 300, train=True).tolist()}
    test = {canonical(table) for table in task.automata(as_generator(0), 40, train=False).tolist()}
    assert test
    assert not train & test


def test_legal_and_distance_of_known_answers():
    task = text_task("regbench", test_examples=6, **SETTINGS)
    batch = next(task.test_batches(6))
    best = task.metrics(task.score(batch.exact.clamp(min=1e-9).log(), batch))
    assert best["legal"] == 100
    assert best["distance"] < 1e-5
    never = 50.0 * torch.nn.functional.one_hot(torch.full((6, task.length), 18))  # a bar is never right
    worst = task.metrics(task.score(never, batch))
    assert worst["legal"] == 0
    assert abs(worst["distance"] - 1) < 1e-5
