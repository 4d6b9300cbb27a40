"""Of the whole suite: threads, garbage, where Triton's kernels run, and which tests need a GPU."""

import gc
import os

import pytest
import torch

if os.environ.keys() & {"PYTEST_XDIST_WORKER", "LINATTN_TEST_PART"}:  # the latter by tools/test_gpu.py
    # Several test processes share the cores: each computes with one thread, or they would wait for one another.
    torch.set_num_threads(1)
# Thousands of tests and all that they import are looked through at every collection, and none of it is garbage.
gc.set_threshold(100_000)
if not torch.cuda.is_available():
    # Triton reads it when it is imported: without a GPU its kernels run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
