"""Where there is a GPU, all tests of kernels run compiled, and belong to those that need it.

Of a test with three or more parametrizations ``make test`` and ``make test-gpu`` run what meets every pair of values;
the other combinations of its cross product are slow. A combination that cannot run is left out of the parametrization:
skipped inside the test, it would count as met.
"""

from collections import defaultdict
from pathlib import Path

import pytest

from kernels.device import DEVICE
from kernels.interpreter import hurry
from kernels.pairs import Cell, covering
from linattn.kernels.common import launching, replaying

if DEVICE == "cpu":
    hurry()


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> None:
    """Of launches of other tests: one that changes a setting is to see what that does."""
    launching.forget()
    replaying.forget()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    products: dict[str, dict[Cell, pytest.Function]] = defaultdict(dict)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            if DEVICE == "cuda":
                item.add_marker(pytest.mark.gpu)
            cell = _cell(item)
            if len(cell) > 2:
                products[item.nodeid.partition("[")[0]][cell] = item
    for cells in products.values():
        for cell in cells.keys() - set(covering(list(cells))):
            cells[cell].add_marker(pytest.mark.slow)


def _cell(item: pytest.Function) -> Cell:
    """The values that each of its parametrizations gives a test."""
    call = getattr(item, "callspec", None)
    axes = [mark.args[0] for mark in item.iter_markers("parametrize")] if call else []
    names = [axis.replace(" ", "").split(",") if isinstance(axis, str) else axis for axis in axes]
    return tuple(repr([call.params[name] for name in own]) for own in names) if call else ()
