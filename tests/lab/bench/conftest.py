"""One thread, and nothing shared between tests; a benchmark run in a folder."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from linattn.lab.bench import benchmark
from linattn.lab.experiment import load_results
from linattn.lab.screen import Screen


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models of a few numbers: several threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    benchmark._shared.clear()
    benchmark._code.cache_clear()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rows_of():
    """The rows of a run in a folder, which must end with ``code``."""

    def run(config, folder, code=0):
        assert replace(config, output=folder).run(Screen(quiet=True)) == code
        return load_results(folder / "results.json")["rows"]

    return run
