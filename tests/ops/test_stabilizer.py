"""The running maximum that turns an exponential sum into a decayed one."""

import math

import pytest
import torch

from linattn.ops.exponential.chunked import stabilize
from linattn.ops.shared.packing import sequence_of_tokens


def by_hand(i, f, start):
    """m_t = max(m_{t-1} + f_t, i_t) for one sequence of Python floats."""
    m, found = start, []
    for i_t, f_t in zip(i, f, strict=True):
        m = max(m + f_t, i_t)
        found.append(m)
    return found


def gates(*shape, size=3.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    i = torch.randn(*shape, generator=g, dtype=torch.float64)
    return size * i, -torch.rand(*shape, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("T", [1, 2, 3, 63, 64, 65, 300])
@pytest.mark.parametrize("start", [None, 4.0])
def test_the_maximum_is_that_of_the_recurrence(T, start):
    i, f = gates(2, 3, T)
    initial = None if start is None else torch.full((2, 3), start)
    s = stabilize(i, f, initial)
    for b in range(2):
        for h in range(3):
            expected = by_hand(i[b, h].tolist(), f[b, h].tolist(), -math.inf if start is None else start)
            torch.testing.assert_close(
                s.log_scale[b, h], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
            )
    assert torch.equal(s.final_log_scale, s.log_scale[..., -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 200.0, 1e6])
def test_decay_and_gain_are_finite_and_at_most_one(dtype, size):
    i, f = gates(2, 2, 257, size=size)
    f = f * size
    i[:, :, :9] = -torch.inf
    i[:, :, 50:60] = -torch.inf
    f[0, :, 55] = -torch.inf
    s = stabilize(i.to(dtype), f.to(dtype))
    for x in (s.log_decay, s.log_gain):
        assert bool(x.isfinite().all())
        assert bool((x <= 0).all())
    assert bool((s.log_scale[:, :, :9] == -torch.inf).all())


@pytest.mark.parametrize("T", [0, 1, 40])
@pytest.mark.parametrize("empty", ["none", "some", "first", "all"])
@pytest.mark.parametrize("start", [None, -math.inf, 2.0])
def test_a_decay_of_1_is_no_decay(T, empty, start):
    """Tokens that add nothing among them, and scales of nothing."""
    i, f = gates(2, 3, T)
    nothing = {"none": i > math.inf, "some": f < -0.5, "first": torch.arange(T).expand_as(i) < 20, "all": i < math.inf}
    i = i.masked_fill(nothing[empty], -math.inf)
    initial = None if start is None else torch.full((2, 3), start, dtype=torch.float64)
    found = []
    for decay in (None, torch.zeros_like(i)):
        leaf = i.clone().requires_grad_()
        s = stabilize(leaf, decay, initial)
        assert (s.log_decay <= 0).all()
        (gradient,) = torch.autograd.grad(s.log_gain.exp().sum(), leaf)
        before = s.log_scale == -math.inf  # of what is not there yet nothing is kept or all
        found.append([*(x.detach() for x in s._replace(log_decay=s.log_decay.masked_fill(before, 0))), gradient])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_tokens_know_their_sequence():
    assert sequence_of_tokens(torch.tensor([0, 0, 2, 2, 5, 5]), 5).tolist() == [1, 1, 3, 3, 3]
    assert sequence_of_tokens(torch.tensor([0, 3], dtype=torch.int32), 3).tolist() == [0, 0, 0]
