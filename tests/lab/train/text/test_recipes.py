"""Recipes: the steps that a paper's epochs are, and a budget and settings that belong together."""

import gzip
import json

import pytest
from tests.lab.train.text.small_text import TASK

from linattn.lab.tasks.text import STANDARDS, text_task
from linattn.lab.tasks.text.registry import task_class
from linattn.lab.train.text.config import (
    TextConfig,
    configure,
    create_task,
    host_of_recipe,
    published,
)
from linattn.lab.train.text.hosts import Host
from linattn.support.options import OptionError

OF_FILES = ("text", "masked-text", "lra-text", "lra-image", "glue", "stsb")


def labelled(folder, rows, packed=False):
    """A folder as GLUE and the reviews have it, with empty lines that count for nothing."""
    folder.mkdir(exist_ok=True)
    text = "\n\n".join(json.dumps({"text": f"word {n}", "label": n % 2}) for n in range(rows)) + "\n"
    if packed:
        (folder / "train.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    else:
        (folder / "train.jsonl").write_text(text)
    (folder / "test.jsonl").write_text(text)
    return str(folder)


def steps(task, given=None, recipe=""):
    return configure(task, given or {}, recipe)["steps"]


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [("mqar-64", 12_500), ("mqar-mix", 22_500), ("mad-recall", 20_000), ("mad-memorization", 400),
     ("regbench", 31_250), ("listops-s5", 76_800), ("lra-text-s5", 17_500), ("lra-image-s5", 225_000),
     ("pathfinder-s5", 500_000), ("path-x-s5", 375_000)],
)  # fmt: skip
def test_epochs_are_those_of_the_papers_data(recipe, expected):
    standard = STANDARDS[recipe]
    assert published(standard)["steps"] == expected
    if standard.task not in OF_FILES:  # those have as many as these hold
        assert steps(create_task(standard.task, {}, recipe), recipe=recipe) == expected


def test_an_epoch_is_what_the_task_has():
    task = text_task("mqar", train_examples=5120)
    assert steps(task) == 64 * 10
    assert steps(task, {"batch_size": 64}) == 64 * 5120 // 64
    assert steps(task, {"batch_size": 64, "steps": 7}) == 7
    assert steps(text_task("mqar")) == 12_500  # without an end: epochs of as many as the paper's
    assert steps(text_task("mqar-mix", train=((64, 4, 2560), (64, 8, 512)))) == 32 * 12
    assert steps(text_task("listops", train_examples=64)) == 5000  # steps are steps
    assert steps(text_task("listops"), {"batch_size": 64}) == 5000
    regbench = create_task("regbench", {}, "regbench")  # a warm-up that is a share of the steps
    assert configure(regbench, {"batch_size": 16}, "regbench")["warmup_steps"] == 2 * 3125


@pytest.mark.parametrize("packed", [False, True])
def test_epochs_of_files_are_of_their_rows(packed, tmp_path):
    data = labelled(tmp_path / "a", 320, packed)
    glue = text_task("glue", data=data)
    assert steps(glue, recipe="glue") == 3 * 320 // 48
    assert steps(glue, recipe="glue-rte") == 3 * 320 // 16
    assert steps(text_task("glue", data=data, hold_out=0.25), recipe="glue") == 3 * 240 // 48
    assert steps(text_task("lra-text", data=data), recipe="lra-text-s5") == 35 * 320 // 50
    assert steps(text_task("glue", data=labelled(tmp_path / "b", 2)), recipe="glue") == 1


PATH_X = {"dash": 5.0, "gap": 4.0, "thickness": 1.5, "marker": 3.0, "seed_distance": 20.0, "continuity": 1.8,
          "distractors": 8, "distractor_contour": 4, "contrast": 0.9, "length": 128**2}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("mqar", {}, {"train_examples": 100_000, "pairs": 4, "test_examples": 3000}),
        ("mqar", {"length": 512}, {"train_examples": 100_000, "pairs": 64}),
        ("mqar", {"length": 512, "pairs": 8, "train_examples": 7}, {"train_examples": 7, "pairs": 8}),
        ("mqar", {"train_examples": None}, {"train_examples": None}),
        # 64 pairs do not go with so few tokens: nobody asked for them
        ("mqar", {"length": 512, "vocab": 64}, {"train_examples": 100_000, "pairs": 4, "vocab": 64}),
        ("mad-recall", {}, {"train_examples": 12_800}),
        ("listops", {"train_examples": 64}, {"train_examples": 64, "test_examples": 2000}),
        ("pathfinder", {"size": 128}, PATH_X),
        ("pathfinder", {}, {"dash": 2.0, "continuity": 1.0, "train_examples": 160_000}),
        ("brevo", {"length": 1536}, {"letters": 4, "word_length": (2, 4)}),
        ("passkey", {"length": 300}, {"length": 300}),
    ],
)
def test_a_recipe_that_nobody_named_brings_its_settings(name, given, expected):
    task = create_task(name, given)
    assert {setting: getattr(task, setting) for setting in expected} == expected


def test_masked_text_hides_what_its_recipe_says(tmp_path):
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 30)
    given = {"data": str(tmp_path / "a.txt"), "length": 16}
    task = create_task("masked-text", given)
    assert (task.share, task.test_share, configure(task, {})["batch_size"]) == (0.3, 0.15, 4096)
    assert create_task("masked-text", given | {"share": 0.2}).share == 0.2
    # and the language model's recipe has none
    assert create_task("text", given) == text_task("text", **given)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: create_task("mqar", {"pairs": 99}), "length: must be at least"),
        (lambda: create_task("mqar", {"colour": 1}), "colour: is no option"),
        (lambda: create_task("chess", {}), "task: must be one of"),
        (lambda: configure(TASK, {"steps": 3, "tokens": 100}), "tokens: gives the budget"),
        (lambda: configure(TASK, {"batch_size": 0}), "batch_size: must be an integer of at least 1, got 0"),
        (lambda: configure(TASK, {}, "secret"), "recipe: must be one of"),
        (lambda: configure(text_task("listops"), {}, "glue"), "recipe: that of glue counts epochs"),
        (lambda: configure(TASK, {}, "listops"), "recipe: listops is for classification tasks, and mqar is causal"),
    ],
)
def test_what_is_given_wrongly_is_named(make, words):
    with pytest.raises(OptionError, match=words):
        make()


@pytest.mark.parametrize(
    ("recipe", "schedule", "floor", "eps"),
    [("listops", "linear", 0, 1e-8), ("mad-recall", "cosine", 2e-3, 1e-8),
     ("listops-s5", "cosine", 0, 1e-8), ("masked-text", "linear", 0.02, 1e-6),
     ("lano-k", "linear", 0, 1e-8), ("depo2-75-released", "cosine", 0.1, 1e-6), ("brevo2-40", "cosine", 0.1, 1e-6),
     ("mano-10", "cosine", 0.1, 1e-8), ("glue-large-cola", "linear", 0, 1e-6)],
)  # fmt: skip
def test_rates_fall_and_adam_divides_as_in_the_source(recipe, schedule, floor, eps):
    found = published(STANDARDS[recipe], 1000)
    assert (found["schedule"], found["eps"]) == (schedule, eps)
    assert found["min_lr"] == pytest.approx(floor * found["lr"])


@pytest.mark.parametrize("name", STANDARDS)
def test_every_recipe_makes_a_config_and_a_host(name):
    TextConfig(**published(STANDARDS[name], 1000))
    assert task_class(STANDARDS[name].task).kind in ("causal", "masked", "classification")
    Host(size="mqar" if STANDARDS[name].task == "mqar" else "base", **host_of_recipe(name))
