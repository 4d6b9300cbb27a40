"""Few images, and costs that are not measured for as long as a table of them would want."""

import json

import numpy
import pytest

from linattn.lab.compare import costs, images
from linattn.lab.screen import Screen
from linattn.lab.tasks.load import load_images as load


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "REPEATS", 2)
    monkeypatch.setattr(costs, "MIN_SECONDS", 0)
    monkeypatch.setattr(costs, "SECONDS_OF_REST", 0)


@pytest.fixture
def few_images(monkeypatch: pytest.MonkeyPatch):
    """Of digits few; archives are as they are."""

    def few(source="digits", **options):
        data = load(source, **options)
        return data.subset(train=96, test=64, seed=0) if source == "digits" else data

    monkeypatch.setattr(images, "load_images", few)
    images.loaded.cache_clear()
    yield few()
    images.loaded.cache_clear()


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> str:
    """Few images as a file, for processes of their own."""
    data, path = load("digits").subset(train=96, test=64, seed=0), tmp_path_factory.mktemp("data") / "few.npz"
    parts = {"train": data.train, "test": data.test}
    pictures = {f"x_{name}": part.images.squeeze(1).numpy() for name, part in parts.items()}
    numpy.savez(path, **pictures, **{f"y_{name}": part.labels.numpy() for name, part in parts.items()})
    return str(path)


@pytest.fixture
def compared():
    """Runs a comparison; its exit code, its results, and its rows of a kind by mechanism and seed."""

    def run(config):
        code = config.run(Screen(quiet=True))
        results = json.loads((config.folder / "results.json").read_text())
        found = {}
        for row in results["rows"]:
            found.setdefault(row["kind"], {})[row["mechanism"], row.get("seed", 0)] = row
        return code, results, found

    return run
