"""Drawn examples are the same in every run, so that a failure can be met again; tiny tensors want one thread."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("contracts", derandomize=True, deadline=None, max_examples=25, database=None)
settings.load_profile("contracts")


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other cost more than sums over a few hundred numbers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
