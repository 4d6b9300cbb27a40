"""MQAR and MAD against dictionaries and filters, token by token."""

import itertools

import pytest
import torch

from linattn.lab.tasks.text import IGNORED, text_task


def rows(batch):
    return zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)


@pytest.mark.parametrize("filler", [False, True])
def test_mqar_asks_for_the_value_of_each_key(filler):
    task = text_task("mqar", vocab=40, length=24, pairs=5, random_filler=filler)
    for tokens, targets in rows(task.batch(0, 50)):
        pairs = dict(zip(tokens[:10:2], tokens[1:10:2], strict=True))
        assert len(pairs) == len(set(pairs.values())) == 5
        assert all(1 <= key < 20 <= value < 40 for key, value in pairs.items())
        asked = {place: target for place, target in enumerate(targets) if target != IGNORED}
        assert sorted(tokens[place] for place in asked) == sorted(pairs)
        assert all(place >= 10 and place % 2 == 0 and pairs[tokens[place]] == v for place, v in asked.items())
        if not filler:
            assert all(token == 0 for place, token in enumerate(tokens) if place >= 10 and place not in asked)


def test_mqar_gaps_follow_the_power_law():
    """With one key the gap g has chance ~ (g + 1)^(power - 1) exactly."""
    task = text_task("mqar", vocab=16, length=10, pairs=1, power=0.5)
    gaps = ((task.batch(0, 20_000).targets != IGNORED).float().argmax(1) - 2) // 2
    expected = torch.arange(1, 5).double() ** -0.5
    expected /= expected.sum()
    found = gaps.bincount(minlength=4) / 20_000
    assert (found - expected).abs().max() < 4 * 0.5 / 20_000**0.5


def test_mqar_mix_has_every_example_of_every_kind_once_an_epoch():
    kinds = ((16, 2, 12), (24, 4, 8))
    task = text_task("mqar-mix", vocab=40, train=kinds, test=((16, 2, 5), (32, 8, 3)))
    seen = {16: [], 24: []}
    for step in range(5):
        batch = task.train_batch(4, 0, step)
        seen[batch.inputs.shape[1]] += map(tuple, batch.inputs.tolist())
    assert [(length, len(set(seen[length]))) for length, _, _ in kinds] == [(16, 12), (24, 8)]
    orders = {tuple(task.train_batch(4, seed, step).inputs.shape[1] for step in range(5)) for seed in range(6)}
    assert len(orders) > 1
    sums = {}
    for batch in task.test_batches(4):
        sign = 1 if batch.inputs.shape[1] == 16 else -1
        logits = sign * torch.nn.functional.one_hot(batch.targets.clamp(min=0), 40)
        for name, value in task.score(logits, batch).items():
            sums[name] = sums.get(name, 0) + value
    found = task.metrics(sums)
    assert (found["accuracy_16x2"], found["accuracy_32x8"]) == (100, 0)
    assert found["accuracy"] == pytest.approx(100 * 10 / (10 + 24))


@pytest.mark.parametrize(("name", "noise"), [("mad-recall", 0), ("mad-noisy-recall", 16)])
def test_mad_recall_scores_values_of_keys_seen_before(name, noise):
    task = text_task(name, length=40)
    keys = (task.vocab - noise) // 2
    noisy = total = 0
    for tokens, targets in rows(task.batch(0, 60)):
        memory, expected = {}, []
        for key, value in zip(tokens[::2], tokens[1::2], strict=True):
            if key >= 2 * keys:
                assert value >= 2 * keys
                expected += [IGNORED, IGNORED]
                noisy += 1
                continue
            assert key < keys <= value < 2 * keys
            assert memory.get(key, value) == value
            expected += [value if key in memory else IGNORED, IGNORED]
            memory[key] = value
        total += 20
        assert expected == targets
        assert targets[-2] != IGNORED  # the last key was there before
    assert (noisy > 0) == (noise > 0)
    if noise:  # one pair and the last are never noise
        assert abs(noisy / total - 0.2 * 18 / 20) < 0.04


@pytest.mark.parametrize("train", [False, True])
def test_fuzzy_recall_by_cutting_the_sequence_into_motifs(train):
    task = text_task("mad-fuzzy-recall", length=60)
    sizes = set()
    for (tokens, targets), mask in zip(rows(task.batch(1, 60, train=train)), task.batch(1, 60, train=train).key_mask,
                                       strict=True):  # fmt: skip
        begin = tokens.index(next(token for token in tokens if token != 15))
        assert mask.tolist() == [place >= begin for place in range(60)]
        tokens, targets = tokens[begin:], targets[begin:]
        assert 15 not in tokens
        # Keys are 0 .. 6, values 7 .. 14: a motif ends where the kind changes.
        cuts = [0, *(n for n in range(1, len(tokens)) if (tokens[n] < 7) != (tokens[n - 1] < 7)), len(tokens)]
        motifs = [tuple(tokens[a:b]) for a, b in itertools.pairwise(cuts)]
        memory, expected = {}, []
        for key, value in zip(motifs[::2], motifs[1::2], strict=True):
            assert len(set(key)) == len(key) <= 3
            assert len(set(value)) == len(value) <= 3
            assert memory.get(key, value) == value
            expected += [IGNORED] * (len(key) - 1) + (list(value) if key in memory else [IGNORED] * len(value))
            expected.append(IGNORED)
            known = key in memory
            memory[key] = value
            sizes.add(len(key))
        assert known  # the last pair was there before
        assert targets == ([*tokens[1:], IGNORED] if train else expected)
    assert sizes == ({1, 2, 3} if train else {3})


def test_selective_copying_is_what_a_filter_leaves():
    task = text_task("mad-selective-copying", length=40, copies=6)
    places = set()
    for tokens, targets in rows(task.batch(0, 40)):
        shown = tokens[: 40 - 7]
        kept = [token for token in shown if token != 14]
        assert len(kept) == 6
        assert all(token < 14 for token in kept)
        assert tokens[33:] == [15] + [14] * 6
        assert targets == [IGNORED] * 34 + kept
        places |= {place for place, token in enumerate(shown) if token != 14}
    assert places == set(range(33))


def test_compression_asks_for_the_whole_sequence():
    task = text_task("mad-compression", length=12)
    batch = task.batch(0, 20)
    assert torch.equal(batch.inputs, batch.targets)
    assert (batch.inputs[:, -1] == 15).all()
    assert set(batch.inputs[:, :-1].flatten().tolist()) == set(range(15))
    assert (task.classes, task.pooling) == (12 * 16, "last")


def test_memorization_has_one_table_for_training_and_tests():
    task = text_task("mad-memorization", vocab=21, length=16, test_examples=50)
    table = {}
    for batch in (*task.test_batches(50), task.train_batch(100, 3, 0)):
        for tokens, targets in rows(batch):
            assert tokens[1::2] == [20] * 8
            assert targets[::2] == [IGNORED] * 8
            for key, value in zip(tokens[::2], targets[1::2], strict=True):
                assert key < 10 <= value < 20
                assert table.setdefault(key, value) == value
    assert len(table) == len(set(table.values())) == 10
    other = text_task("mad-memorization", vocab=21, length=16, data_seed=1)
    assert other.table.tolist() != task.table.tolist()
