"""Children that start fast."""

import multiprocessing

import pytest

from linattn.bench import children


@pytest.fixture
def quick_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked by a server that has imported all they need. Two tests of test_children.py start theirs as users do."""
    multiprocessing.set_forkserver_preload(["linattn.bench.kernels.start", "linattn.bench.models.start"])
    monkeypatch.setattr(children, "_CONTEXT", multiprocessing.get_context("forkserver"))
