"""Accelerate offloads a model, and what reads weights outside of their own forward still finds them."""

import pytest
import torch
from torch import nn

from linattn.support.offloading import is_offloaded, weights_here

accelerate = pytest.importorskip("accelerate")


class Reader(nn.Module):
    """Reads weights in another method, before and after a forward that brings them itself."""

    def __init__(self):
        super().__init__()
        self.own, self.inner = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

    def read(self, x):
        return self.own * self.inner.bias + self.inner(x) + self.inner.bias


def test_weights_are_there_inside_and_gone_behind():
    model, x = Reader(), torch.ones(3)
    expected = model.read(x)
    assert not is_offloaded(model)
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert is_offloaded(model)
    wrapped = model.inner.forward
    with weights_here(model):
        assert torch.equal(model.read(x), expected)
    assert model.own.is_meta
    assert model.inner.weight.is_meta
    assert model.inner.forward is wrapped
    with pytest.raises(KeyError, match="inside"), weights_here(model):
        raise KeyError("inside")
    assert model.own.is_meta
    assert not model.inner(x).is_meta  # its own forward brings them as before
