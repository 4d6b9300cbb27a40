"""Sets that are drawn: in words while they are made, kept in a folder where one is named, and drawn once."""

from dataclasses import replace

import pytest
from tests.lab.tasks.text.test_protocol import same

from linattn.lab.tasks.text import generated as drawn
from linattn.lab.tasks.text import text_task
from linattn.lab.tasks.text.recall import Mqar
from linattn.support.options import OptionError


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(drawn, "BLOCK", 4)
    monkeypatch.setattr(drawn, "PART", 2)


SMALL = {"vocab": 64, "length": 16, "pairs": 2, "train_examples": 21, "test_examples": 6}


def mqar(**settings):
    return text_task("mqar", **SMALL | settings)


@pytest.mark.parametrize("name", ["mqar", "listops", "regbench"])
def test_a_kept_set_is_the_drawn_one(name, tmp_path):
    """With a mask of padding, without, and with true distributions; read again too."""
    settings = {
        "mqar": {"vocab": 64, "length": 16, "pairs": 2},
        "listops": {"shortest": 5, "length": 40},
        "regbench": {"words": (2, 4), "word_length": (1, 9)},
    }[name] | {"train_examples": 21, "test_examples": 6}
    plain = text_task(name, **settings)
    for _ in range(2):
        kept = text_task(name, **settings, cache=str(tmp_path))
        for step in range(4):
            assert same(kept.train_batch(5, 0, step), plain.train_batch(5, 0, step))
        assert same(next(kept.test_batches(6)), next(plain.test_batches(6)))


def test_what_is_kept_is_not_drawn_again_and_a_stopped_set_loses_a_file_at_most(tmp_path, monkeypatch):
    drawn_at_once, real = [], Mqar.draw

    def draw(self, generator, count, train):
        drawn_at_once.append(count)
        if len(drawn_at_once) == 5:  # in the second file
            raise KeyboardInterrupt
        return real(self, generator, count, train)

    monkeypatch.setattr(Mqar, "draw", draw)
    monkeypatch.setattr(drawn, "cpu_count", lambda: 1)  # one after another, so that the fifth is the fifth
    with pytest.raises(KeyboardInterrupt):
        mqar(cache=str(tmp_path)).prepare(test=False)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]
    # The first block tells the folder; then what the first file has not. Whole files serve larger sets.
    for size, asked in ((21, [4, 4, 4, 4, 1]), (21, [4]), (24, [4, 4, 4])):
        before = len(drawn_at_once)
        mqar(cache=str(tmp_path), train_examples=size).prepare(test=False)
        assert drawn_at_once[before:] == asked


def test_a_setting_that_does_not_show_at_once_has_a_folder_of_its_own(tmp_path, monkeypatch):
    real = Mqar.draw
    monkeypatch.setattr(Mqar, "draw", lambda self, *given: real(mqar(), *given))
    for power in (0.01, 0.02):
        mqar(cache=str(tmp_path), power=power).prepare(test=False)
    assert len(list(tmp_path.rglob("0-8.pt"))) == 2
    assert mqar(cache="somewhere").identity() == mqar().identity() != mqar(power=0.02).identity()


def test_what_another_version_drew_is_not_read(tmp_path, monkeypatch):
    """Not a file of it, also where the first one was deleted."""
    mqar(cache=str(tmp_path)).prepare()
    for path in tmp_path.rglob("0-*.pt"):
        path.unlink()
    real = Mqar.draw

    def draw(self, generator, count, train):
        found = real(self, generator, count, train)
        return replace(found, inputs=found.inputs.flip(0), targets=found.targets.flip(0))

    monkeypatch.setattr(Mqar, "draw", draw)
    kept, plain = mqar(cache=str(tmp_path)), mqar()
    assert same(kept.train_batch(21, 0, 0), plain.train_batch(21, 0, 0))


def test_a_damaged_file_is_named(tmp_path):
    task = mqar(cache=str(tmp_path))
    task.prepare()
    (path,) = tmp_path.rglob("train-set/*/8-8.pt")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(OptionError, match=r"^cache: .*/8-8\.pt cannot be read .*: delete it$"):
        replace(task).prepare()
