"""What holds for every task: batches are functions of their number, tests are fixed, sums add up, errors name."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import islice

import pytest
import torch

from linattn.lab.tasks.text import IGNORED, STANDARDS, Sequences, text_task, text_tasks
from linattn.lab.tasks.text.registry import task_class
from linattn.support.options import OptionError

SMALL = {
    "mqar": {"vocab": 64, "length": 32, "pairs": 4},
    "mad-recall": {"length": 32},
    "mad-noisy-recall": {"length": 32},
    "mad-fuzzy-recall": {"length": 32},
    "mad-selective-copying": {"length": 32, "copies": 4},
    "mad-compression": {"length": 8},
    "mad-memorization": {"vocab": 32, "length": 16},
    "regbench": {"words": (2, 4), "word_length": (1, 9), "train_examples": 20},
    "listops": {"shortest": 5, "length": 60},
    "pathfinder": {"contour": 5, "distractors": 2},
    "passkey": {"length": 300},
    "depo": {"letters": 9, "nodes": 5, "hops": 2, "length": 64},
    "brevo": {"nodes": 5, "length": 64},
    "mano": {"operations": 3, "length": 48},
}
FILES = {"text", "masked-text", "lra-text", "lra-image", "glue", "stsb"}
OTHERS = FILES | {"mqar-mix", "capo", "lano"}  # tried in files of their own


@pytest.fixture(scope="module", params=list(SMALL))
def task(request):
    return text_task(request.param, test_examples=11, **SMALL[request.param])


def same(one: Sequences, other: Sequences) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in ("inputs", "targets", "key_mask", "exact")]
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


def test_every_task_is_tried():
    assert set(SMALL) | OTHERS == set(text_tasks())


def test_shapes_and_ids_are_as_declared(task):
    for batch in (task.train_batch(3, 0, 0), task.batch(0, 3)):
        assert batch.inputs.shape == (3, task.length)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert 0 <= batch.inputs.min() <= batch.inputs.max() < task.vocabulary
        scored = batch.targets[batch.targets != IGNORED]
        assert len(scored)
        assert 0 <= scored.min() <= scored.max() < (task.classes or task.vocabulary)
        assert batch.targets.shape[0] == 3
        assert batch.targets.ndim == (1 if task.classes in (2, 10) else 2)
        if batch.key_mask is not None:
            assert batch.key_mask.any(1).all()


def test_a_batch_depends_on_seed_and_number_alone(task):
    run = list(islice(task.train_batches(4, seed=5), 4))
    late = next(text_task(task.name, test_examples=11, **SMALL[task.name]).train_batches(4, seed=5, start=3))
    assert same(run[3], late)
    assert not same(run[0], run[1])
    assert not same(run[0], task.train_batch(4, seed=6, step=0))


def test_test_batches_are_fixed_finite_and_not_those_of_training(task):
    small = list(task.test_batches(4))
    again = next(text_task(task.name, test_examples=11, **SMALL[task.name]).test_batches(11))
    assert [len(batch) for batch in small] == [4, 4, 3]
    assert torch.equal(torch.cat([batch.inputs for batch in small]), again.inputs)
    assert torch.equal(torch.cat([batch.targets for batch in small]), again.targets)
    seen = {tuple(row) for step in range(5) for row in task.train_batch(8, 0, step).inputs.tolist()}
    assert not seen & {tuple(row) for row in again.inputs.tolist()}


def test_a_seed_gives_the_same_batch_and_a_generator_moves_on(task):
    assert same(task.batch(1, 2), task.batch(1, 2))
    generator = torch.Generator().manual_seed(0)
    assert not same(task.batch(generator, 2), task.batch(generator, 2))


def test_sums_add_up_to_the_mean_of_all(task):
    batch = next(task.test_batches(11))
    classes = task.classes or task.vocabulary
    shape = (11, classes) if task.kind == "classification" else (11, task.length, classes + 3)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parts = [task.score(logits[a:b], batch.take(slice(a, b))) for a, b in ((0, 4), (4, 11))]
    added = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    whole = task.score(logits, batch)
    assert all(value.dtype == torch.float64 and value.ndim == 0 for value in whole.values())
    found, expected = task.metrics(added), task.metrics(whole)
    assert found == pytest.approx(expected, rel=1e-6)
    assert found["loss"] == pytest.approx(float(task.loss(logits, batch)), rel=1e-5)
    assert task.metric in found


def test_right_answers_score_100_and_wrong_ones_0(task):
    batch = next(task.test_batches(11))
    width = task.vocabulary if task.name == "mad-compression" else task.classes or task.vocabulary
    right = torch.nn.functional.one_hot(batch.targets.clamp(min=0), width) * 9.0
    if task.name == "mad-compression":
        right = right.flatten(1)
    assert task.metrics(task.score(right, batch))["accuracy"] == 100
    assert task.metrics(task.score(-right, batch))["accuracy"] == 0
    assert task.metrics(task.score(right, batch))[task.metric] == 100


def test_a_finite_training_set_comes_once_an_epoch():
    task = text_task("mqar", train_examples=10, **SMALL["mqar"])
    rows = [tuple(row) for batch in islice(task.train_batches(4, 0), 5) for row in batch.inputs.tolist()]
    assert len(set(rows[:10])) == 10
    assert set(rows[:10]) == set(rows[10:])
    assert rows[:10] != rows[10:]


def test_threads_that_ask_at_once_share_one_training_set(monkeypatch):
    task = text_task("mqar", train_examples=300, **SMALL["mqar"])
    drawn, draw = [], type(task).draw
    monkeypatch.setattr(type(task), "draw", lambda self, *given: drawn.append(given) or draw(self, *given))
    with ThreadPoolExecutor(8) as pool:
        batches = list(pool.map(lambda step: task.train_batch(4, 0, step), range(16)))
    assert len(drawn) == 2  # blocks of 256 and 44, once each
    assert all(same(batch, task.train_batch(4, 0, step)) for step, batch in enumerate(batches))


@pytest.mark.parametrize("name", STANDARDS)
def test_published_settings_fit_their_task(name):
    found = STANDARDS[name]
    assert set(found.settings) <= {field.name for field in fields(task_class(found.task))}
    assert (found.steps is None) != (found.epochs is None)
    assert found.settings.get("train_examples", found.examples) == found.examples
    if found.task not in FILES:
        assert text_task(found.task, **found.settings).name == found.task


WRONG = {
    "task": ("mqr", {}, "must be one of text, masked-text, mqar"),
    "pears": ("mqar", {"pears": 3}, "there are cache, data_seed, length"),
    "data": ("text", {}, "text needs a text file"),
    "length": ("mqar", {"length": 14, "pairs": 4}, "at least 4 x pairs = 16"),
    "vocab": ("mad-fuzzy-recall", {"vocab": 7}, "at least 8"),
    "noise": ("mad-noisy-recall", {"noise": 1.5}, "at most 0.99"),
    "edges": ("regbench", {"edges": (1, 9)}, "at most 3"),
    "words": ("regbench", {"words": (5, 2)}, "first <= last"),
    "separation": ("pathfinder", {"separation": 1.0}, "above gap = 1.5"),
    "test_examples": ("listops", {"test_examples": 0}, "at least 1"),
    "digits": ("passkey", {"digits": 0}, "at least 1"),
    "power": ("mqar", {"power": "small"}, "must be a number, got 'small'"),
    "random_filler": ("mqar", {"random_filler": "perhaps"}, "must be true or false"),
    "train_examples": ("mqar", {"train_examples": 1e5}, "must be an integer, got 100000.0"),
    "nodes": ("regbench", {"nodes": 4}, "must be a tuple of 2, got 4"),
    "arguments": ("listops", {"arguments": (2, 3, 4)}, "must be a tuple of 2, got (2, 3, 4)"),
    "test": ("mqar-mix", {"test": ((64, 4),)}, "must be a tuple of 3, got (64, 4)"),
    "train": ("mqar-mix", {"train": ()}, "must be (length, pairs, examples) of each kind"),
    "evaluate": ("text", {"data": "x", "evaluate": 1}, "must be one of test, valid, got 1"),
}


@pytest.mark.parametrize("option", WRONG)
def test_wrong_settings_are_named(option):
    name, settings, message = WRONG[option]
    with pytest.raises(OptionError, match=re.escape(message)) as error:
        text_task(name, **settings)
    assert error.value.option == option


def test_wrong_calls_are_named(task):
    with pytest.raises(OptionError, match="batch_size"):
        task.train_batch(0, 0, 0)
    batch = task.batch(0, 2)
    with pytest.raises(ValueError, match="do not fit targets"):
        task.score(torch.zeros(3, 5, 7), batch)
