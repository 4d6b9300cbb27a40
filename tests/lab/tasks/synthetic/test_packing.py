"""What the controlled tasks share: windows of instances, sizes, names that differ."""

import numpy as np
import pytest
import torch

from linattn.lab.tasks.synthetic import words as words_module
from linattn.lab.tasks.synthetic.packed import draw_sizes
from linattn.lab.tasks.synthetic.words import Words
from linattn.lab.tasks.text import text_task
from linattn.support.options import OptionError

SMALL = {
    "depo": {"letters": 9, "nodes": 7, "hops": 3, "length": 96},
    "brevo": {"nodes": 7, "length": 96},
    "mano": {"operations": 4, "length": 96},
    "lano": {"root": 13, "length": 96},
}


def is_bos(task, tokens):
    if task.name == "depo":
        return tokens == task.words.tokens
    if task.name == "mano":
        return (tokens == task.first_mark) | (tokens == task.first_mark + 1)
    return tokens == (task.bos if task.name == "brevo" else 0)


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
        for row, flags in zip(*task.windows(np.random.default_rng(0), 12, train), strict=True):
            begins = np.nonzero(is_bos(task, row))[0]
            parts = [tuple(part) for part in np.split(row, begins[1:])]
            assert begins[0] == 0
            assert all(part in whole for part in parts[:-1])
            assert any(full[: len(parts[-1])] == parts[-1] for full in whole)
            assert flags[: begins[-1]].any()
            if parts[-1] not in whole:
                cut += 1
                assert train or not flags[begins[-1] :].any()
        assert cut > 3


def test_small_sizes_come_more_often_and_tests_have_the_largest():
    sizes = draw_sizes(np.random.default_rng(0), 40_000, 30, True)
    counts = np.bincount(sizes, minlength=31)[3:]
    chances = 1 / (np.arange(3, 31) + 30**0.5)
    expected = 40_000 * chances / chances.sum()
    assert np.abs(counts - expected).max() < 5 * expected.max() ** 0.5
    assert set(draw_sizes(np.random.default_rng(0), 9, 30, False)) == {30}


def test_names_differ_and_both_ways_to_draw_them_agree(monkeypatch):
    words, sizes = Words(6, 1, 2), np.full(3000, 12)
    lexicon = {tuple(row[: int(length)]) for row, length in zip(words.lexicon, words.lengths, strict=True)}
    assert len(lexicon) == 6 + 36
    assert all(word[-1] > 6 >= max([0, *word[:-1]]) for word in lexicon)
    short = []
    for draw in (words._by_clocks, words._by_draws):
        found = draw(np.random.default_rng(1), sizes).reshape(3000, 12)
        assert all(len(set(row)) == 12 for row in found.tolist())
        short.append((words.lengths[found] == 1).sum(1))
    error = (sum(s.var() for s in short) / 3000) ** 0.5
    assert abs(short[0].mean() - short[1].mean()) < 4 * error
    monkeypatch.setattr(words_module, "enough", lambda _, largest: np.arange(largest + 1))  # draws run out
    late = words._by_draws(np.random.default_rng(2), sizes).reshape(3000, 12)
    assert all(len(set(row)) == 12 for row in late.tolist())
    assert abs((words.lengths[late] == 1).sum(1).mean() - short[0].mean()) < 4 * error


def test_what_does_not_fit_is_named():
    for name, settings, option in (
        ("depo", {"length": 64}, "length"),
        ("depo", {"letters": 2, "word_length": (1, 1), "nodes": 5, "length": 64}, "letters"),
        ("brevo", {"source": "code"}, "source"),
        ("mano", {"operations": 0}, "operations"),
        ("lano", {"root": 5}, "root"),
        ("capo", {"length": 40}, "length"),
    ):
        with pytest.raises(OptionError) as error:
            text_task(name, **settings)
        assert error.value.option == option


def test_threads_of_torch_do_not_change_what_is_drawn():
    batch = text_task("depo", **SMALL["depo"]).train_batch(4, 0, 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    again = text_task("depo", **SMALL["depo"]).train_batch(4, 0, 3)
    torch.set_num_threads(threads)
    assert torch.equal(batch.inputs, again.inputs)
