"""One thread, and nothing shared between tests."""

from collections.abc import Iterator

import pytest
import torch

from linattn.lab.bench import running


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models of a few numbers: several threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    running._shared.clear()
    running.machine_of.cache_clear()
    yield
    torch.set_num_threads(before)
