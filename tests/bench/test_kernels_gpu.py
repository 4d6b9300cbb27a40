"""What the races need of a GPU: graphs that replay, calls that cannot be captured, kernels seen by the profiler."""

import pytest
import torch

from linattn.bench.kernels import clock
from linattn.bench.kernels.clock import CALLS, GRAPH, LONG_CALLS, capture, extra_bytes, time_call
from linattn.bench.kernels.floor import measure_ceilings
from linattn.bench.models.profiling import profile_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


def test_a_graph_replays_forward_and_backward():
    x = torch.randn(64, 64, device=CUDA, requires_grad=True)
    total = torch.zeros(64, 64, device=CUDA)

    def call():
        (grad,) = torch.autograd.grad((x**3).sum(), x)
        total.add_(grad)
        return grad

    replay = capture(call)
    assert replay is not None
    torch.cuda.synchronize()
    total.zero_()
    replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(total, 3 * x.detach() ** 2)


def test_a_call_that_waits_is_timed_as_it_is_called_and_the_next_one_is_well():
    x = torch.randn(1024, device=CUDA)

    def waits():
        return x * x.sum().item()

    assert time_call(waits, CUDA, 5).by == CALLS
    clocked = time_call(lambda: x * 2, CUDA, 5)
    assert clocked.by == GRAPH
    assert 0 < clocked.timing.p20 <= clocked.timing.median <= clocked.timing.p80


@pytest.mark.parametrize(("limit", "by"), [(0.0, LONG_CALLS), (float("inf"), GRAPH)])
def test_calls_beyond_a_limit_need_no_graph(monkeypatch, limit, by):
    monkeypatch.setattr(clock, "LONG_MS", limit)
    a = torch.randn(256, 256, device=CUDA)
    assert time_call(lambda: a @ a, CUDA, 5).by == by


def test_memory_beyond_what_is_returned():
    x = torch.randn(2**20, device=CUDA)
    assert extra_bytes(lambda: x + 1, CUDA) == 0
    assert extra_bytes(lambda: (x + 1) * 2, CUDA) == 4 * 2**20


def test_ceilings_are_those_of_a_gpu():
    ceilings = measure_ceilings(CUDA)
    assert 1e11 < ceilings.bandwidth < 2e13
    assert 1e12 < ceilings.matmul < 1e16


def test_the_profiler_sees_products_and_eager_elementwise_kernels():
    a = torch.randn(512, 512, device=CUDA)
    found = profile_step(lambda: (a @ a).pow(3), CUDA)
    assert {"matrix product", "eager elementwise"} <= found["shares"].keys()
    assert sum(found["eager_elementwise"].values()) >= 1
