"""Of the whole suite: threads, where Triton's kernels run, which tests need a GPU, and parts of the suite."""

import os

import pytest
import torch

# "3/10": the fourth of ten parts, for processes that share the suite without pytest-xdist (tools/test_gpu.py).
PART = os.environ.get("LINATTN_TEST_PART")

if PART or "PYTEST_XDIST_WORKER" in os.environ:
    # Several test processes share the cores: each computes with one thread, or they would wait for one another.
    torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton reads it when it is imported: without a GPU its kernels run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


class Part:
    """Keeps every n-th test of those that were chosen by name or marker."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        assert PART is not None
        index, count = map(int, PART.split("/"))
        others = [item for n, item in enumerate(items) if n % count != index]
        items[:] = items[index::count]
        config.hook.pytest_deselected(items=others)


def pytest_configure(config: pytest.Config) -> None:
    if PART:
        config.pluginmanager.register(Part())
