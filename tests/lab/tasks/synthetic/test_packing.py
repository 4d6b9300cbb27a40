"""What the controlled tasks share: windows of instances, sizes, names that differ."""

import numpy as np
import pytest
import torch

from linattn.lab.tasks.synthetic import packed
from linattn.lab.tasks.text import IGNORED, text_task
from linattn.support.options import OptionError

SMALL = {
    "depo": {"letters": 9, "nodes": 7, "hops": 3, "length": 96},
    "brevo": {"nodes": 7, "length": 96},
    "mano": {"operations": 4, "length": 96},
    "lano": {"root": 13, "length": 96},
}


def is_bos(task, tokens):
    if task.name == "mano":
        return (tokens == task.first_mark) | (tokens == task.first_mark + 1)
    return tokens == getattr(task, "bos", 0)


@pytest.mark.parametrize("name", SMALL)
def test_windows_begin_with_a_whole_instance_and_what_is_cut_is_not_scored_in_a_test(name, monkeypatch):
    task = text_task(name, **SMALL[name])
    stream = task.instances(np.random.default_rng(0), 400, True)
    assert bool(is_bos(task, stream.tokens[stream.starts]).all())
    assert int(is_bos(task, stream.tokens).sum()) == 400
    whole = {tuple(part) for part in np.split(stream.tokens, stream.starts[1:])}
    monkeypatch.setattr(type(task), "instances", lambda *_: stream)
    for train in (True, False):
        cut = 0
        batch = packed.PackedTask.draw(task, torch.Generator(), 12, train)
        for tokens, targets in zip(batch.inputs.numpy(), batch.targets.numpy() != IGNORED, strict=True):
            begins = np.nonzero(is_bos(task, tokens))[0]
            parts = [tuple(part) for part in np.split(tokens, begins[1:])]
            assert begins[0] == 0
            assert all(part in whole for part in parts[:-1])
            assert any(full[: len(parts[-1])] == parts[-1] for full in whole)
            assert targets[: begins[-1]].any()
            if not any(full[: len(parts[-1])] == parts[-1] and len(full) <= len(parts[-1]) + 1 for full in whole):
                cut += 1
                assert train or not targets[begins[-1] :].any()
        assert cut > 3


def test_small_sizes_come_more_often_and_tests_have_the_largest():
    task = text_task("brevo", nodes=30)
    counts = np.bincount(task.sizes(np.random.default_rng(0), 40_000, True), minlength=31)[3:]
    chances = 1 / (np.arange(3, 31) + 30**0.5)
    expected = 40_000 * chances / chances.sum()
    assert np.abs(counts - expected).max() < 5 * expected.max() ** 0.5
    assert set(task.sizes(np.random.default_rng(0), 9, False)) == {30}


@pytest.mark.parametrize(
    ("name", "settings", "option"),
    [
        ("depo", {"length": 64}, "length"),
        ("depo", {"letters": 2, "word_length": (1, 1), "nodes": 5, "length": 64}, "letters"),
        ("depo", {"letters": 1000, "word_length": (5, 7), "nodes": 5}, "letters"),
        ("depo", {"word_length": (2, 1)}, "word_length"),
        ("lano", {"root": 5}, "root"),
        ("capo", {"length": 40}, "length"),
    ],
)
def test_what_does_not_fit_is_named(name, settings, option):
    with pytest.raises(OptionError) as error:
        text_task(name, **settings)
    assert error.value.option == option
