"""Few images, and costs that are not measured for as long as a table of them would want."""

from functools import partial

import numpy
import pytest

from linattn.lab.bench.cost import throughput_in_turns
from linattn.lab.compare import compare as main
from linattn.lab.compare import measure
from linattn.lab.compare import text_costs as costs
from linattn.lab.tasks.load import load_images as load


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second of each model and pass is what these tests would spend most of their time on."""
    monkeypatch.setattr(measure, "throughput_in_turns", partial(throughput_in_turns, min_seconds=0))
    monkeypatch.setattr(costs, "MIN_SECONDS", 0)


@pytest.fixture
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of digits few; archives are as they are."""

    def few(source="digits", **options):
        data = load(source, **options)
        return data.subset(train=96, test=64, seed=0) if source == "digits" else data

    monkeypatch.setattr(main, "load_images", few)


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> str:
    """Few images as a file, for processes of their own."""
    data, path = load("digits").subset(train=96, test=64, seed=0), tmp_path_factory.mktemp("data") / "few.npz"
    parts = {"train": data.train, "test": data.test}
    images = {f"x_{name}": part.images.squeeze(1).numpy() for name, part in parts.items()}
    numpy.savez(path, **images, **{f"y_{name}": part.labels.numpy() for name, part in parts.items()})
    return str(path)
