import json
from dataclasses import replace
from io import StringIO

import pytest
import torch
from linattn.lab.bench.throughput.chart import draw_throughput_chart, throughput_figure
from linattn.lab.bench.throughput.rows import ThroughputResult, ThroughputRow
from linattn.lab.bench.throughput.run import TrainingSubject, draw_batch, run_throughput
from linattn.lab.bench.throughput.screen import throughput
from linattn.lab.bench.throughput.settings import ThroughputConfig
from rich.console import Console

from linattn.lab.bench.throughput import run as run_module
from linattn.support.options import OptionError

SMALL = ThroughputConfig(
    device="cpu", mechanisms=("elu",), dtype="float32", quick=True, lengths=(8, 16), tokens=32, backend="eager", steps=2
)


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(run_module, "compile_host", lambda model, mode, backend: model)


def opened(config):
    result = ThroughputResult(config.describe(["test"]))
    result.meta["runs"] = [{"date": "", "command": ""}]
    return result


def test_all_lengths_have_as_many_tokens_of_the_same_text():
    batches = [draw_batch(SMALL, length) for length in (8, 16)]
    assert [tuple(inputs.shape) for inputs, _ in batches] == [(4, 8), (2, 16)]
    assert torch.equal(batches[0][0].flatten(), batches[1][0].flatten())
    assert torch.equal(batches[0][0].flatten()[1:], batches[0][1].flatten()[:-1])


def test_a_compiled_row_is_checked_timed_and_weighed():
    config = replace(SMALL, mechanisms=(), lengths=(16,))
    (row,) = run_throughput(config, opened(config)).rows
    assert row.status == "ok", row.reason
    assert 0 < row.error <= row.budget < 1e-4
    assert row.first_seconds > row.median_ms / 1000 > 0
    assert row.tokens_per_second == pytest.approx(32000 / row.median_ms)
    assert row.peak_bytes > 4 * row.parameters  # gradients of all of them at the least


@pytest.mark.parametrize(
    ("fault", "worst"), [("the loss is off", "loss"), ("a gradient is missing", "gradient of embedding.weight")]
)
def test_a_step_that_is_wrong_is_not_timed(monkeypatch, fault, worst):
    def compile_wrongly(model, mode, backend):
        head, stem = model.head, model.stem
        if fault == "the loss is off":
            # As a compiler's fault would: only in the code that has a graph for gradients.
            model.head = lambda x, targets: head(x, targets) * (1.01 if torch.is_grad_enabled() else 1)
        else:
            model.stem = lambda inputs: stem(inputs).detach()

    monkeypatch.setattr(run_module, "compile_host", compile_wrongly)
    config = replace(SMALL, lengths=(16,))
    result = run_throughput(config, opened(config))
    assert [row.status for row in result.rows] == ["WRONG", "WRONG"]
    for row in result.rows:
        assert row.reason.startswith(f"{worst} is off by")
        assert row.median_ms is None


@pytest.mark.usefixtures("uncompiled")
def test_rows_resume_and_a_chart_is_drawn(monkeypatch, tmp_path):
    path, screen = tmp_path / "throughput.json", StringIO()
    right, filled = TrainingSubject.fill, []

    def fill(self, row):
        filled.append(row.key)
        if row.key == ("elu", 8) and len(filled) < 4:
            raise RuntimeError("no such\nkernel")
        right(self, row)

    monkeypatch.setattr(TrainingSubject, "fill", fill)
    console = Console(file=screen, width=150)
    assert throughput(SMALL, path, console) == 1
    first = json.loads(path.read_text())
    assert [row["status"] for row in first["rows"]] == ["ok", "ok", "failed", "ok"]
    assert "wrong or failed: elu, 8" in screen.getvalue()
    assert throughput(SMALL, path, console, resume=True) == 0
    assert filled[4:] == [("elu", 8)]
    last = json.loads(path.read_text())
    assert last["rows"][:2] == first["rows"][:2]
    assert last["rows"][2]["status"] == "ok"
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(OptionError, match="other settings"):
        throughput(replace(SMALL, tokens=64), path, console, resume=True)


def test_crossovers_of_made_up_rows(tmp_path):
    result = ThroughputResult(SMALL.describe(["test"]))
    for length, softmax in ((2048, 100.0), (8192, 200.0), (32768, 600.0)):
        for name, ms in (("softmax", softmax), ("gated", 120.0)):
            result.put(ThroughputRow(name, median_ms=ms, tokens_per_second=32.768e6 / ms, length=length))
    (found,) = result.crossovers()
    # log-log between (2048, 100 / 120) and (8192, 200 / 120): log 1.2 of log 2, of two doublings.
    assert found.length == pytest.approx(2048 * 1.2**2)
    assert (found.longest, found.gain) == (32768, 5)
    assert result.as_json()["crossovers"][0]["mechanism"] == "gated"
    lines = {line.get_label(): line for line in throughput_figure(result).axes[0].lines}
    assert list(lines["gated"].get_ydata()) == pytest.approx([32768 / 120] * 3)
    assert not draw_throughput_chart(ThroughputResult(result.meta), tmp_path / "none.png")


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"tokens": 24}, "tokens"),
        ({"tokens": 8}, "tokens"),
        ({"lengths": ()}, "lengths"),
        ({"backend": "none"}, "backend"),
        ({"steps": 0}, "steps"),
        ({"mechanisms": ("nobody",)}, "mechanisms"),
    ],
)
def test_wrong_settings_name_the_option(change, option):
    with pytest.raises(OptionError) as caught:
        replace(SMALL, **change).check()
    assert caught.value.option == option
