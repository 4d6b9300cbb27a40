"""Where there is a GPU, all tests of kernels run compiled, and belong to those that need it."""

from pathlib import Path

import pytest

from ops.triton.device import DEVICE


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE == "cuda":
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.gpu)
