"""`linattn decoding`: steps whose logits are checked against the whole context, and states of a known size."""

from dataclasses import replace

import pytest
import torch

from linattn.lab.bench.decoding import CHECKED_TOKENS, Decoder, Decoding, Prefix, overtakes
from linattn.lab.bench.hosts import FULL, TINY, ModelCase

CPU = torch.device("cpu")
SMALL = Decoding(
    device="cpu", mechanisms=("gated",), quick=True, contexts=(12, 30), batch=(1, 2), modes=("eager",), steps=2
)


def test_every_row_is_checked_timed_and_weighed(rows_of, tmp_path):
    rows = rows_of(SMALL, tmp_path)
    assert {(r["mechanism"], r["context"], r["batch"]) for r in rows} == {
        (m, T, b) for m in ("softmax", "gated") for T in (12, 30) for b in (1, 2)
    }
    layers, heads, D = TINY.depth, TINY.heads, TINY.width // TINY.heads
    for row in rows:
        assert row["status"] == "ok", row["reason"]
        assert 0 < row["error"] <= row["budget"] < 1e-4
        assert row["checked_against"] == f"fp64, {row['context']} tokens at once"
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["repeats"] == 2
        assert row["tokens_per_second"] == pytest.approx(1000 * row["batch"] / row["median_ms"])
        numbers = 2 * (row["context"] + 1) * D if row["mechanism"] == "softmax" else D * (D + 1)
        assert row["state_bytes"] == 4 * layers * row["batch"] * heads * numbers
        weights = sum(
            p.numel() for p in ModelCase("", 1, tokens=1, decoder=TINY).create(row["mechanism"], CPU, 0).parameters()
        )
        assert row["weight_bytes"] == 4 * weights
        assert row["total_bytes"] == row["weight_bytes"] + row["state_bytes"] + row["peak_bytes"]
        assert sum(row["explain"].values()) == layers
    assert (tmp_path / "decoding.png").read_bytes().startswith(b"\x89PNG")
    graphs = rows_of(replace(SMALL, modes=("cuda-graph",)), tmp_path)
    assert {(row["status"], row["reason"]) for row in graphs} == {("absent", "CUDA graphs need a GPU")}


@pytest.mark.parametrize("fault", ["the state is not handed on", "the position stays"])
def test_a_broken_step_is_wrong_and_is_not_timed(rows_of, monkeypatch, tmp_path, fault):
    right, overwrite = Decoder.run, Decoder._overwrite

    def broken(self):
        position = self.position.clone()
        right(self)
        if fault == "the position stays":
            self.position.copy_(position)

    monkeypatch.setattr(Decoder, "run", broken)
    if fault == "the state is not handed on":
        monkeypatch.setattr(Decoder, "_overwrite", lambda self, new: overwrite(self, self.states))
    rows = rows_of(replace(SMALL, contexts=(12,), batch=(2,)), tmp_path, code=1)
    (row,) = [row for row in rows if row["mechanism"] == "gated"]
    assert row["status"] == "WRONG"
    assert "median_ms" not in row
    assert row["error"] > 10 * row["budget"]
    assert row["reason"].startswith("logits of sequence")


@pytest.mark.parametrize("mechanism", ["mlstm", "zeros", "softmax"])
def test_steps_from_states_that_stay_in_their_memory(mechanism):
    """What a CUDA graph replays: states are overwritten, a cache writes one slot again and again."""
    prefix = Prefix(SMALL.filled(), mechanism, 12)
    decoder = Decoder(prefix, 2)

    def places():
        leaves = torch.utils._pytree.tree_leaves(decoder.states)
        return [x.data_ptr() for x in leaves if isinstance(x, torch.Tensor)]

    before = places()
    for _ in range(2):  # again after a restart
        found = decoder.read()
        assert found.shape[:2] == (2, 1 if mechanism == "softmax" else CHECKED_TOKENS)
        assert prefix.check(found).ok
        decoder.restart()
    assert places() == before
    assert not prefix.check(found * 1.001).ok
    assert not prefix.check(found * float("nan")).ok
    found[1] *= 1.01
    assert prefix.check(found).worst == "logits of sequence 1"


def test_models():
    with torch.device("meta"):
        model = ModelCase("", 1, tokens=1, decoder=FULL).create("softmax", torch.device("meta"), 0)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(135e6, rel=0.01)
    # No second norm stands behind a mechanism that has one.
    for mechanism, normed in (("softmax", False), ("zeros", False), ("gated", True)):
        blocks = ModelCase("", 1, tokens=1, decoder=TINY).create(mechanism, CPU, 0).blocks
        assert [block.attn.norm is not None for block in blocks] == [normed] * len(blocks)


def test_overtakes_are_told_for_each_batch_and_mode():
    rows = [
        {"mechanism": name, "context": T, "batch": batch, "mode": "eager", "status": "ok", "median_ms": ms}
        for batch, scale in ((1, 1.0), (16, 9.0)) for T in (1024, 4096)
        for name, ms in (("softmax", scale * T / 1024), ("gated", 2.0))
    ]  # fmt: skip
    rows.append({"mechanism": "gated", "context": 1024, "batch": 1, "mode": "cuda-graph", "status": "absent"})
    found = {own["setting"]: own["length"] for own in overtakes(rows)}
    assert found == {"batch 1, eager": pytest.approx(2048), "batch 16, eager": 1024}
