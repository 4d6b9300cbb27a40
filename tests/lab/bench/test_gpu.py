"""What a CPU cannot show: graphs that replay, calls that cannot be captured, a full device, whole benchmarks."""

from dataclasses import replace

import pytest
import torch

from linattn.lab.bench.decoding import Decoding
from linattn.lab.bench.hosts import FULL
from linattn.lab.bench.kernels import Kernels, measure_ceilings
from linattn.lab.bench.memory import extra_bytes
from linattn.lab.bench.models import Models, Throughput
from linattn.lab.bench.timing import CALLS, GRAPH, time_call, time_kernels
from linattn.lab.train.captured_step import recorded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
MECHANISMS = ("gated", "mlstm", "retention", "elu", "zeros")


@pytest.fixture
def two_layers(monkeypatch):
    """The widths that are measured, without the depth; in this process, so that it knows of it."""
    for module in ("decoding", "models"):
        monkeypatch.setattr(f"linattn.lab.bench.{module}.FULL", replace(FULL, depth=2, vocabulary=1024))


def test_a_graph_replays_forward_and_backward():
    x = torch.randn(64, 64, device=CUDA, requires_grad=True)
    total = torch.zeros(64, 64, device=CUDA)

    def call():
        (grad,) = torch.autograd.grad((x**3).sum(), x)
        total.add_(grad)
        return grad

    replay = recorded(call, CUDA)
    assert replay is not None
    torch.cuda.synchronize()
    total.zero_()
    replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(total, 3 * x.detach() ** 2)


def test_a_call_that_waits_is_timed_as_it_is_called_and_the_next_one_is_well():
    x = torch.randn(1024, device=CUDA)
    assert time_kernels(lambda: x * x.sum().item(), CUDA, 5)[1] == CALLS
    timed, by = time_kernels(lambda: x * 2, CUDA, 5)
    assert by == GRAPH
    assert 0 < timed.p20 <= timed.median <= timed.p80
    assert time_call(lambda: x * 2, CUDA, 5).median > 0


def test_memory_beyond_what_is_returned_and_ceilings():
    x = torch.randn(2**20, device=CUDA)
    assert extra_bytes(lambda: x + 1, CUDA) == 0
    assert extra_bytes(lambda: (x + 1) * 2, CUDA) == 4 * 2**20
    ceilings = measure_ceilings(CUDA)
    assert 1e11 < ceilings["copy_bytes_per_second"] < 2e13
    assert 1e12 < ceilings["matmul_per_second"] < 1e16


@pytest.mark.usefixtures("two_layers")
def test_steps_are_right_as_they_are_called_and_captured(rows_of, tmp_path):
    config = Decoding(mechanisms=MECHANISMS, contexts=(96, 1000), batch=(1, 3), steps=3, where="here")
    rows = rows_of(config, tmp_path)
    assert {row["status"] for row in rows} == {"ok"}
    for name in MECHANISMS:
        assert len({row["state_bytes"] / row["batch"] for row in rows if row["mechanism"] == name}) == 1
    gated = [row for row in rows if (row["mechanism"], row["context"], row["batch"]) == ("gated", 1000, 1)]
    own = {row["mode"]: row["median_ms"] for row in gated}
    assert own["cuda-graph"] < own["eager"]


@pytest.mark.usefixtures("two_layers")
def test_a_cache_that_does_not_fit_is_a_row(rows_of, tmp_path):
    free = torch.cuda.mem_get_info()[0]
    batch = 2 * free // (2 * 2 * 2 * 576 * 1024)  # twice what is free, of two layers' keys and values in bf16
    config = Decoding(mechanisms=("elu",), contexts=(1024,), batch=(batch, 1), modes=("eager",), steps=2, where="here")
    found = {(row["mechanism"], row["batch"]): row["status"] for row in rows_of(config, tmp_path)}
    assert found["softmax", batch] == "out of memory"
    assert (found["softmax", 1], found["elu", 1]) == ("ok", "ok")


@pytest.mark.slow
@pytest.mark.usefixtures("two_layers")
def test_compiled_training_steps_are_right(rows_of, tmp_path):
    config = Throughput(mechanisms=("gated",), lengths=(512, 2048), tokens=2048, milliseconds=50, where="here")
    rows = rows_of(config, tmp_path)
    assert {row["status"] for row in rows} == {"ok"}
    assert all(text.startswith("triton") for row in rows if row["mechanism"] != "softmax" for text in row["explain"])


def test_kernels_and_models_are_right_in_processes_of_their_own(rows_of, tmp_path):
    config = Kernels(quick=True, only=("causal-4096", "relu-196"), contenders=("linattn",), cold=False)
    assert {row["status"] for row in rows_of(config, tmp_path / "kernels")} == {"ok"}
    config = Models(quick=True, only=("nalaformer_xtiny-224",), modes=("eager-graph",), milliseconds=5)
    assert {row["status"] for row in rows_of(config, tmp_path / "models")} == {"ok"}
