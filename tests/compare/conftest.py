"""Costs are measured, and not for as long as a table of them would want."""

from functools import partial

import pytest

from linattn.bench.model_cost import throughput_in_turns
from linattn.compare import measure
from linattn.compare.text import costs


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second of each model and pass is what these tests would spend most of their time on."""
    monkeypatch.setattr(measure, "throughput_in_turns", partial(throughput_in_turns, min_seconds=0))
    monkeypatch.setattr(costs, "MIN_SECONDS", 0)
