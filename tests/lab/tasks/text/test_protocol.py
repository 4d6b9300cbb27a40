"""What holds for every task: batches are functions of their number, tests are fixed, sums add up, errors name."""

import re
from dataclasses import fields

import pytest
import torch

from linattn.lab.tasks.text import IGNORED, STANDARDS, Sequences, text_task
from linattn.lab.tasks.text.registry import TASKS, task_class
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
    assert set(SMALL) | OTHERS == set(TASKS)


def test_shapes_and_ids_are_as_declared(task):
    for batch in (task.train_batch(3, 0, 0), task.batch(0, 3)):
        assert batch.inputs.shape == (3, task.length)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert 0 <= batch.inputs.min() <= batch.inputs.max() < task.vocabulary
        scored = batch.targets[batch.targets != IGNORED]
        assert 0 <= scored.min() <= scored.max() < (task.classes or task.vocabulary)
        assert (len(batch.targets), batch.targets.ndim) == (3, 1 if task.classes in (2, 10) else 2)
        if batch.key_mask is not None:
            assert batch.key_mask.any(1).all()


def test_a_batch_depends_on_seed_and_number_alone(task):
    run = [task.train_batch(4, 5, step) for step in range(4)]
    assert same(run[3], text_task(task.name, test_examples=11, **SMALL[task.name]).train_batch(4, 5, 3))
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
    rows = [tuple(row) for step in range(5) for row in task.train_batch(4, 0, step).inputs.tolist()]
    assert len(set(rows[:10])) == 10
    assert set(rows[:10]) == set(rows[10:])
    assert rows[:10] != rows[10:]


@pytest.mark.parametrize("name", STANDARDS)
def test_published_settings_fit_their_task(name):
    found = STANDARDS[name]
    assert set(found.settings) <= {field.name for field in fields(task_class(found.task))}
    assert (found.steps is None) != (found.epochs is None)
    assert found.settings.get("train_examples", found.examples) == found.examples
    assert found.settings.get("length", 64) % 64 == 0
    assert found.task == "capo" or (found.steps or 0) % 100 == 0  # papers count in round numbers
    if found.task not in FILES:
        assert text_task(found.task, **found.settings).name == found.task


WRONG = {
    "task": ("mqr", {}, "must be one of text, masked-text, passkey, mqar"),
    "pears": ("mqar", {"pears": 3}, "there are cache, data_seed, length"),
    "data": ("text", {}, "text needs a text file"),
    "length": ("mqar", {"length": 14, "pairs": 4}, "at least 4 x pairs = 16"),
    "vocab": ("mad-fuzzy-recall", {"vocab": 7}, "at least 8"),
    "noise": ("mad-noisy-recall", {"noise": 1.5}, "at most 0.99"),
    "edges": ("regbench", {"edges": (1, 9)}, "at most 3"),
    "words": ("regbench", {"words": (5, 2)}, "first <= last"),
    "separation": ("pathfinder", {"separation": 1.0}, "above gap = 1.5"),
    "power": ("mqar", {"power": 0}, "must be above 0"),
    "train_examples": ("capo", {"train_examples": 9}, "must be left out"),
    "alphabet": ("regbench", {"alphabet": (4, 19)}, "must be within the 18 symbols"),
    "arguments": ("listops", {"arguments": (0, 3)}, "must be at least 1, got 0"),
    "test": ("mqar-mix", {"test": ((64, 4),)}, "must be a tuple of 3, got (64, 4)"),
    "train": ("mqar-mix", {"train": ()}, "must be (length, pairs, examples) of each kind"),
}


@pytest.mark.parametrize("option", WRONG)
def test_wrong_settings_are_named(option):
    name, settings, message = WRONG[option]
    with pytest.raises(OptionError, match=re.escape(message)) as error:
        text_task(name, **settings)
    assert error.value.option == option


def test_wrong_calls_are_named(task):
    batch = task.batch(0, 2)
    with pytest.raises(ValueError, match="do not fit targets"):
        task.score(torch.zeros(3, 5, 7), batch)
