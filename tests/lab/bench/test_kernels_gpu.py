"""What the races need of a GPU: graphs that replay, calls that cannot be captured, kernels seen by the profiler."""

import pytest
import torch
from linattn.lab.bench.kernels.clock import (
    CALLS,
    GRAPH,
    LEAST_CALLS,
    LONG_CALLS,
    by_replays,
    capture,
    extra_bytes,
    time_call,
)
from linattn.lab.bench.kernels.floor import measure_ceilings
from linattn.lab.bench.models.beforehand import check_one
from linattn.lab.bench.models.hosts import create_host, draw_batch
from linattn.lab.bench.models.profiling import profile_step
from linattn.lab.bench.models.settings import ModelsConfig
from linattn.lab.bench.models.steps import EAGER_GRAPH, make_step, run_aside, side_stream
from linattn.lab.bench.models.subject import Subject

from linattn.lab.bench.kernels import clock
from linattn.lab.bench.memory import peak_bytes

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


def test_runs_aside_are_what_a_capture_needs_and_replays_are_timed():
    x, w = (torch.randn(64, 64, device=CUDA, requires_grad=True) for _ in range(2))
    total = torch.zeros(64, 64, device=CUDA)

    def call():
        (grad,) = torch.autograd.grad((x @ w).square().sum(), x)
        total.add_(grad)
        return (grad,)

    exact = 2 * (x @ w).detach() @ w.detach().T
    for _ in range(2):
        (grad,) = run_aside(call, CUDA)()
        torch.cuda.synchronize()
        torch.testing.assert_close(grad, exact)
    replay = capture(call, 0, side_stream(CUDA))
    assert replay is not None
    torch.cuda.synchronize()
    total.zero_()
    replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(total, exact)
    timing = by_replays(replay, 1.0)
    assert 0 < timing.p20 <= timing.median <= timing.p80
    assert timing.repeats >= LEAST_CALLS


@pytest.mark.parametrize("mechanism", ["softmax", "nala"])
def test_the_peak_of_an_eager_step_is_that_of_the_plain_step_and_has_no_workspaces(mechanism):
    config = ModelsConfig(cases=("nalaformer_xtiny-224",), modes=(EAGER_GRAPH,), milliseconds=5, quick=True)
    (case,) = config.selected()
    row = check_one((case, mechanism, EAGER_GRAPH), config)
    assert 0 < row.error <= row.budget
    Subject(config, case, mechanism, lambda what: None).measure(row)
    assert row.status == "ok", row.reason
    assert row.median_ms > 0
    host = create_host(case, mechanism, CUDA, 0)
    step = make_step(host, host, *draw_batch(case, CUDA, 0), autocast=True)
    step()
    assert 1 / 1.4 < row.peak_bytes / peak_bytes(step, CUDA) < 1.4


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
