"""`linattn throughput`: as many tokens at every length, steps that are checked before they are timed."""

from dataclasses import replace

import pytest
import torch

from lab.bench.running import rows_of
from linattn.lab.bench import throughput
from linattn.lab.bench.language import TINY
from linattn.lab.bench.throughput import Throughput, draw_batch

SMALL = Throughput(device="cpu", mechanisms=("elu",), quick=True, lengths=(8, 16), tokens=32, backend="eager", steps=2)


def test_all_lengths_have_as_many_tokens_of_the_same_text():
    batches = [draw_batch(SMALL, length) for length in (8, 16)]
    assert [tuple(inputs.shape) for inputs, _ in batches] == [(4, 8), (2, 16)]
    assert torch.equal(batches[0][0].flatten(), batches[1][0].flatten())
    assert torch.equal(batches[0][0].flatten()[1:], batches[0][1].flatten()[:-1])
    assert (Throughput(**{"device": "cpu", "quick": True}).filled().tokens, SMALL.filled().tokens) == (64, 32)


def test_compiled_rows_are_checked_timed_weighed_and_drawn(tmp_path):
    rows = rows_of(SMALL, tmp_path)
    assert [(row["mechanism"], row["length"], row["batch"]) for row in rows] == [
        ("softmax", 8, 4), ("softmax", 16, 2), ("elu", 8, 4), ("elu", 16, 2)
    ]  # fmt: skip
    for row in rows:
        assert row["status"] == "ok", row["reason"]
        assert 0 < row["error"] <= row["budget"] < 1e-4
        assert row["first_seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(32000 / row["median_ms"])
        assert row["peak_bytes"] > 4 * row["parameters"]  # gradients of all of them at the least
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("fault", "worst"), [("the loss is off", "loss"), ("a gradient is missing", "gradient of embedding.weight")]
)
def test_a_step_that_is_wrong_is_not_timed(monkeypatch, tmp_path, fault, worst):
    def compile_wrongly(model, mode, backend):
        head, stem = model.head, model.stem
        if fault == "the loss is off":
            # As a compiler's fault would: only in the code that has a graph for gradients.
            model.head = lambda x, targets: head(x, targets) * (1.01 if torch.is_grad_enabled() else 1)
        else:
            model.stem = lambda inputs: stem(inputs).detach()

    monkeypatch.setattr(throughput, "compile_host", compile_wrongly)
    rows = rows_of(replace(SMALL, lengths=(16,)), tmp_path, code=1)
    assert [row["status"] for row in rows] == ["WRONG", "WRONG"]
    for row in rows:
        assert row["reason"].startswith(f"{worst} is off by")
        assert "median_ms" not in row


def test_the_first_layers_stand_for_a_deeper_model(monkeypatch, tmp_path):
    monkeypatch.setattr("linattn.lab.bench.language.TINY", replace(TINY, depth=4))
    rows = rows_of(replace(SMALL, lengths=(16,)), tmp_path)
    assert [(row["status"], row["checked_against"]) for row in rows] == [("ok", "fp64, plain PyTorch, 2 layers")] * 2


def test_a_loss_that_is_not_finite_after_some_steps_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setattr(throughput, "LEARNING_RATE", float("inf"))
    rows = rows_of(replace(SMALL, mechanisms=(), lengths=(16,)), tmp_path, code=1)
    assert [row["reason"] for row in rows] == ["the loss is not finite after some steps"]
