"""What a CPU cannot show: captured steps, flash kernels, compiled code, a device that is full."""

from dataclasses import replace

import pytest
import torch
from linattn.lab.bench.decoding.rows import DecodingResult
from linattn.lab.bench.decoding.run import run_decoding
from linattn.lab.bench.decoding.settings import DecodingConfig
from linattn.lab.bench.language.sizes import FULL
from linattn.lab.bench.throughput.rows import ThroughputResult
from linattn.lab.bench.throughput.run import run_throughput
from linattn.lab.bench.throughput.settings import ThroughputConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
MECHANISMS = ("gated", "mlstm", "retention", "elu", "zeros")


@pytest.fixture
def two_layers(monkeypatch):
    """The widths that are measured, without the depth."""
    monkeypatch.setattr("linattn.lab.bench.language.settings.FULL", replace(FULL, depth=2, vocabulary=1024))


def opened(kind, config):
    result = kind(config.describe(["test"]))
    result.meta["runs"] = [{"date": "", "command": ""}]
    return result


@pytest.mark.usefixtures("two_layers")
@pytest.mark.parametrize("kv_heads", [9, 3])
def test_steps_are_right_as_they_are_called_and_captured(kv_heads):
    config = DecodingConfig(
        mechanisms=MECHANISMS, kv_heads=kv_heads, contexts=(96, 1000), batches=(1, 3), steps=3, piece=256
    )
    result = run_decoding(config, opened(DecodingResult, config))
    assert [(str(row), row.reason) for row in result.rows if row.status != "ok"] == []
    for name in MECHANISMS:
        assert {g["state"] for g in result.growth() if g["mechanism"] == name} == {1.0}
    graphs, eager = (result.times("gated", 1, mode)[1000] for mode in ("cuda-graph", "eager"))
    assert graphs < eager


@pytest.mark.usefixtures("two_layers")
def test_a_cache_that_does_not_fit_is_a_row():
    free = torch.cuda.mem_get_info()[0]
    batch = 2 * free // (2 * 2 * 2 * 576 * 1024)  # twice what is free, of two layers' keys and values in bf16
    config = DecodingConfig(mechanisms=("elu",), contexts=(1024,), batches=(batch, 1), modes=("eager",), steps=2)
    result = run_decoding(config, opened(DecodingResult, config))
    found = {(row.mechanism, row.batch): row.status for row in result.rows}
    assert found["softmax", batch] == "out of memory"
    assert (found["softmax", 1], found["elu", 1]) == ("ok", "ok")


@pytest.mark.slow
@pytest.mark.usefixtures("two_layers")
def test_compiled_training_steps_are_right():
    config = ThroughputConfig(mechanisms=("gated",), lengths=(512, 2048), tokens=2048, steps=2)
    result = run_throughput(config, opened(ThroughputResult, config))
    assert [(str(row), row.reason) for row in result.rows if row.status != "ok"] == []
    assert all(text.startswith("triton") for row in result.rows if row.mechanism != "softmax" for text in row.explain)
