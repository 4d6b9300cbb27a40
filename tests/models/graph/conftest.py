"""Every test of graphs computes in fp64 unless it says otherwise, from one seed."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _in_double() -> Iterator[None]:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
