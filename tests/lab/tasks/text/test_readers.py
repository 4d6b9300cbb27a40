"""Labelled sequences from jsonl and npz files."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from linattn.lab.tasks.text import text_task
from linattn.support.options import OptionError


def write(folder, **parts):
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(folder)


def reviews(count, word):
    return [{"text": f"{word} {n} é" * (n % 7), "label": n % 2} for n in range(count)]


def test_lra_text_is_bytes_and_padding(tmp_path):
    rows = reviews(20, "train")
    task = text_task("lra-text", data=write(tmp_path, train=rows, test=reviews(9, "test")), length=40)
    assert (task.vocabulary, task.classes, task.kind) == (257, 2, "classification")
    batch = next(task.test_batches(9))
    for n, (tokens, mask) in enumerate(zip(batch.inputs.tolist(), batch.key_mask.tolist(), strict=True)):
        expected = (f"test {n} é" * (n % 7)).encode()[:40]
        assert bytes(token - 1 for token in tokens[: len(expected)]) == expected
        assert tokens[len(expected) :] == [0] * (40 - len(expected))
        assert sum(mask) == len(expected)
    assert batch.targets.tolist() == [n % 2 for n in range(9)]
    assert [len(batch) for batch in task.test_batches(4)] == [4, 4, 1]
    epoch = torch.cat([task.train_batch(5, 0, step).targets for step in range(4)])
    assert epoch.sum() == 10  # every example once


def test_held_out_examples_are_never_trained_on(tmp_path):
    rows = [{"text": f"number {n:03}", "label": n % 2} for n in range(40)]
    settings = {"data": write(tmp_path, train=rows, test=reviews(4, "x")), "length": 16, "hold_out": 0.25}
    task = text_task("lra-text", evaluate="valid", **settings)
    held = {tuple(row) for batch in task.test_batches(4) for row in batch.inputs.tolist()}
    trained = {tuple(row) for step in range(10) for row in task.train_batch(8, 0, step).inputs.tolist()}
    assert (len(held), len(trained)) == (10, 30)
    assert not held & trained
    final = text_task("lra-text", **settings)
    assert {tuple(row) for step in range(10) for row in final.train_batch(8, 0, step).inputs.tolist()} == trained


def test_lra_image_is_grey_pixels_in_rows(tmp_path):
    random = np.random.default_rng(0)
    arrays = {
        "x_train": random.integers(256, size=(20, 4, 5, 3), dtype=np.uint8),
        "y_train": np.arange(20) % 3,
        "x_test": random.integers(256, size=(6, 4, 5, 3), dtype=np.uint8),
        "y_test": np.arange(6) % 3,
    }
    np.savez(tmp_path / "small.npz", **arrays)
    task = text_task("lra-image", data=str(tmp_path / "small.npz"))
    assert (task.length, task.vocabulary, task.classes) == (20, 256, 3)
    batch = next(task.test_batches(6))
    grey = np.rint(arrays["x_test"].astype(float) @ [0.299, 0.587, 0.114]).reshape(6, 20)
    assert np.abs(batch.inputs.numpy() - grey).max() <= 1  # halves may round either way in fp32
    assert (batch.inputs.numpy() == grey).mean() > 0.95
    assert batch.targets.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.key_mask is None
    seen = {tuple(row) for step in range(9) for row in task.train_batch(4, 0, step).inputs.tolist()}
    assert len(seen) == 18  # a tenth is held out
    np.savez(tmp_path / "grey.npz", **arrays | {k: arrays[k][..., 0] for k in ("x_train", "x_test")})
    flat = next(text_task("lra-image", data=str(tmp_path / "grey.npz")).test_batches(6)).inputs
    assert np.array_equal(flat.numpy(), arrays["x_test"][..., 0].reshape(6, 20))


def test_glue_pairs_share_the_room(tmp_path):
    cases = [("ab", "cd"), ("a" * 20, "b"), ("a", "b" * 20), ("a" * 20, "b" * 20)]
    rows = [{"sentence1": a, "sentence2": b, "label": label} for (a, b), label in zip(cases, "xyxy", strict=True)]
    task = text_task("glue", data=write(tmp_path, train=rows, dev=rows), length=10)
    batch = next(task.test_batches(4))
    found = ["".join("|" if t == 256 else chr(t) for t in row if t) for row in batch.inputs.tolist()]
    assert found == ["ab|cd", "aaaaaaaa|b", "a|bbbbbbbb", "aaaaa|bbbb"]
    assert (task.label_names, task.classes, batch.targets.tolist()) == (("x", "y"), 2, [0, 1, 0, 1])
    assert task.vocabulary == 258  # the ids of masked-text
    named = text_task("glue", data=str(tmp_path), length=10, labels=("y", "x"))
    assert next(named.test_batches(4)).targets.tolist() == [1, 0, 1, 0]


def test_glue_f1_and_matthews_are_those_of_sklearn(tmp_path):
    rows = [{"sentence": "s", "label": n % 2} for n in range(4)]
    task = text_task("glue", data=write(tmp_path, train=rows, validation=rows))
    generator = torch.Generator().manual_seed(0)
    true, said = (torch.randint(2, (200,), generator=generator) for _ in range(2))
    batch = next(task.test_batches(1)).take(torch.zeros(200, dtype=torch.int64))
    object.__setattr__(batch, "targets", true)
    found = task.metrics(task.score(torch.nn.functional.one_hot(said, 2).float(), batch))
    for name, metric in (("f1", f1_score), ("matthews", matthews_corrcoef), ("accuracy", accuracy_score)):
        assert found[name] == pytest.approx(100 * metric(true, said), rel=1e-5)


def similar(tmp_path, count=40):
    rows = [{"sentence1": "a" * (n % 7), "sentence2": "b", "label": round(n % 11 / 2, 1)} for n in range(count)]
    return write(tmp_path, train=rows, validation=rows[::-1]), [row["label"] for row in rows]


def test_similarity_against_numpy(tmp_path):
    data, labels = similar(tmp_path)
    task = text_task("stsb", data=data, length=12)
    assert (task.classes, task.metric, task.train_size) == (1, "pearson", 40)
    logits = torch.randn(40, 1, generator=torch.Generator().manual_seed(0)) + 2
    sums: dict = {}
    for part, batch in zip(logits.split(16), task.test_batches(16), strict=True):
        assert batch.targets.dtype == torch.float32
        for name, value in task.score(part, batch).items():
            sums[name] = sums.get(name, 0.0) + value
    said, true = logits[:, 0].double().numpy(), np.array(labels[::-1])
    found = task.metrics(sums)
    assert found["pearson"] == pytest.approx(100 * np.corrcoef(said, true)[0, 1], rel=1e-9)
    assert found["loss"] == pytest.approx(((said - true) ** 2).mean(), rel=1e-6)
    assert found["near"] == pytest.approx(100 * (np.abs(said - true) <= 0.5).mean())
    whole = next(task.test_batches(40))
    assert float(task.loss(logits, whole)) == pytest.approx(found["loss"], rel=1e-6)
    assert task.metrics(task.score(torch.zeros(40, 1), whole))["pearson"] == 0
    assert task.metrics(task.score(whole.targets[:, None], whole))["pearson"] == pytest.approx(100)


def test_similar_pairs_are_held_out_at_every_height(tmp_path):
    task = text_task("stsb", data=similar(tmp_path, 110)[0], length=12, hold_out=0.2, evaluate="valid")
    held = torch.cat([batch.targets for batch in task.test_batches(8)])
    assert len(held) == 22
    assert held.round().long().bincount().min() >= 2


LINES = {
    "lra-text": [
        ({"text": "a", "label": 7}, "label must be one of 0, 1 or its number, got 7"),
        ({"text": "a", "label": True}, "one of 0, 1 or its number, got True"),
        ({"words": "a", "label": 0}, 'needs a "text"'),
    ],
    "glue": [
        ({"sentence": "a", "label": 2.5}, "all names of classes, got 2.5; labels that .* are for the task stsb"),
        ({"sentence": "a", "label": True}, "all whole numbers or all names of classes, got True"),
        ({"words": "a", "label": 0}, "a line needs one of sentence; text; sentence1 and sentence2"),
    ],
    "stsb": [
        ({"sentence": "a", "label": "x"}, "label must be a number, got 'x'"),
        ({"sentence": "a", "label": float("nan")}, "label must be a number, got nan"),  # Python reads it as a number
    ],
}


@pytest.mark.parametrize(("name", "row", "message"), [(name, *case) for name in LINES for case in LINES[name]])
def test_wrong_lines_are_named(tmp_path, name, row, message):
    folder = write(tmp_path, train=[row], test=[row])
    with pytest.raises(OptionError, match=f"data: .*train.jsonl.*{message}"):
        text_task(name, data=folder).train_batch(1, 0, 0)


def test_wrong_files_and_options_are_named(tmp_path):
    (tmp_path / "damaged.npz").write_bytes(b"PK")
    with pytest.raises(OptionError, match=r"data: .*damaged.npz is no archive, or a damaged one"):
        _ = text_task("lra-image", data=str(tmp_path / "damaged.npz")).length
    for name, settings, message in (
        ("lra-text", {"data": "nowhere"}, "data: must be a folder with train.jsonl or train.jsonl.gz, got .nowhere"),
        ("lra-image", {}, "data: must be an .npz file"),
        ("stsb", {"data": similar(tmp_path)[0], "labels": ("a", "b")}, "labels: must be None"),
        ("glue", {"evaluate": "valid"}, "hold_out: must be above 0"),
    ):
        with pytest.raises(OptionError, match=message):
            text_task(name, **{"data": str(tmp_path)} | settings)
