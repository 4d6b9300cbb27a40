"""One thread, and children that start fast."""

import multiprocessing
from collections.abc import Iterator

import pytest
import torch

from linattn.lab.bench import children


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models of a few numbers: several threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quick_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked by a server that has imported all they need. Two tests of test_children.py start theirs as users do."""
    multiprocessing.set_forkserver_preload(["linattn.lab.bench.kernels.start", "linattn.lab.bench.models.start"])
    monkeypatch.setattr(children, "_CONTEXT", multiprocessing.get_context("forkserver"))
