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


def test_sequences_do_not_meet():
    lengths = [0, 5, 1, 0, 70, 0]
    cu = torch.tensor([0, *lengths]).cumsum(0)
    i, f = gates(1, 2, 76)
    i[0, 0, 2] = 500.0  # a huge value in one sequence must not reach the next
    start, _ = gates(6, 2, seed=1)
    start[0, 0] = -torch.inf
    start[2, 1] = -torch.inf
    packed = stabilize(i, f, start, cu)
    for n, (s, e) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        alone = stabilize(i[:, :, s:e], f[:, :, s:e], start[n : n + 1])
        for name in ("log_decay", "log_gain", "log_scale"):
            a, b = getattr(packed, name)[:, :, s:e], getattr(alone, name)
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        torch.testing.assert_close(packed.final_log_scale[n], alone.final_log_scale[0], rtol=0, atol=1e-12)


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


def test_rounding_never_makes_the_decay_a_growth():
    """One early maximum that only decays: every g is 0, computed from sums in different orders."""
    i, f = gates(4, 4, 1000)
    i[:, :, 1:] = -1e4
    s = stabilize(i, f)
    assert bool((s.log_decay <= 0).all())
    assert bool((s.log_decay > -1e-11).all())


def test_a_sum_in_units_of_the_maximum_is_the_sum():
    i, f = gates(1, 1, 40)
    x = torch.rand(40, generator=torch.Generator().manual_seed(3)).double()
    s = stabilize(i, f)
    plain = stable = torch.zeros(()).double()
    for t in range(40):
        plain = f[0, 0, t].exp() * plain + i[0, 0, t].exp() * x[t]
        stable = s.log_decay[0, 0, t].exp() * stable + s.log_gain[0, 0, t].exp() * x[t]
        torch.testing.assert_close(s.log_scale[0, 0, t].exp() * stable, plain, rtol=1e-12, atol=0)


def test_a_forgotten_state_is_gone_even_when_nothing_follows():
    i = torch.tensor([[[5.0, -torch.inf, -torch.inf, 1.0]]])
    f = torch.tensor([[[0.0, -torch.inf, 0.0, 0.0]]])
    s = stabilize(i, f)
    assert s.log_scale.tolist() == [[[5.0, -math.inf, -math.inf, 1.0]]]
    assert s.log_decay.exp().tolist() == [[[1.0, 0.0, 1.0, 1.0]]]
    assert s.log_gain.exp().tolist() == [[[1.0, 0.0, 0.0, 1.0]]]


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


def test_gradients_take_the_maximum_for_a_constant():
    i, f = gates(1, 2, 20)
    start, _ = gates(1, 2, seed=4)
    inputs = [x.requires_grad_() for x in (i, f, start)]
    s = stabilize(*inputs)
    d_i, d_f, d_start = torch.autograd.grad(s.log_decay.sum() + s.log_gain.sum(), inputs)
    assert torch.equal(d_i, torch.ones_like(i))
    assert torch.equal(d_f, torch.ones_like(f))
    assert torch.equal(d_start, torch.ones_like(start))
    assert not s.log_scale.requires_grad


def test_tokens_know_their_sequence():
    assert sequence_of_tokens(torch.tensor([0, 0, 2, 2, 5, 5]), 5).tolist() == [1, 1, 3, 3, 3]
    assert sequence_of_tokens(torch.tensor([0, 3], dtype=torch.int32), 3).tolist() == [0, 0, 0]
