"""`linattn decoding`: steps whose logits are checked against the whole context, and states of a known size."""

from dataclasses import replace

import pytest
import torch

from lab.bench.running import rows_of, statuses
from linattn.lab.bench import decoder as decoder_module
from linattn.lab.bench.decoder import CHECKED_TOKENS, Decoder, DecodingTruth, Prefix, use_static_cache
from linattn.lab.bench.decoding import Decoding, overtakes
from linattn.lab.bench.language import FULL, TINY, create_model, draw_text

CPU = torch.device("cpu")
SMALL = Decoding(
    device="cpu", mechanisms=("gated",), quick=True, contexts=(12, 30), batch=(1, 2), modes=("eager",), steps=2, piece=8
)


def subject_at(mechanism, context, kv_heads=2):
    size = replace(TINY, kv_heads=kv_heads)
    model = create_model(size, mechanism, CPU, 0).eval()
    if mechanism == "softmax":
        use_static_cache(model)
    text = draw_text(size, (context + CHECKED_TOKENS,), CPU, 0)
    return model, text, Prefix(model, text, 8).reach(context)


def test_every_row_is_checked_timed_and_weighed(tmp_path):
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
        assert row["tokens_per_second"] == pytest.approx(1000 * row["batch"] / row["median_ms"])
        numbers = 2 * row["context"] * D if row["mechanism"] == "softmax" else D * (D + 1)
        assert row["state_bytes"] == 4 * layers * row["batch"] * heads * numbers
        weights = sum(p.numel() for p in create_model(TINY, row["mechanism"], CPU, 0).parameters())
        assert row["weight_bytes"] == 4 * weights
        assert row["total_bytes"] == row["weight_bytes"] + row["state_bytes"] + row["peak_bytes"]
        assert sum(row["explain"].values()) == layers
    assert (tmp_path / "decoding.png").read_bytes().startswith(b"\x89PNG")
    graphs = rows_of(replace(SMALL, modes=("cuda-graph",)), tmp_path)
    assert {(row["status"], row["reason"]) for row in graphs} == {("absent", "CUDA graphs need a GPU")}


@pytest.mark.parametrize("fault", ["the state is not handed on", "the position stays"])
def test_a_broken_step_is_wrong_and_is_not_timed(monkeypatch, tmp_path, fault):
    right = Decoder._step

    def broken(self):
        states, position = self.states, self.position.clone()
        right(self)
        if fault == "the position stays":
            self.position.copy_(position)
        else:
            self.states = states

    monkeypatch.setattr(Decoder, "_step", broken)
    rows = rows_of(replace(SMALL, contexts=(12,), batch=(2,)), tmp_path, code=1)
    assert statuses(rows, "mechanism") == {("softmax", "WRONG"), ("gated", "WRONG")}
    for row in rows:
        assert "median_ms" not in row
        assert row["error"] > 10 * row["budget"]
        assert row["reason"].startswith("logits of sequence")


@pytest.mark.parametrize("mechanism", ["mlstm", "zeros", "softmax"])
def test_states_that_stay_in_their_memory_give_the_same(monkeypatch, mechanism):
    """What a CUDA graph replays, here called: states are overwritten, a cache writes one slot again and again."""
    model, text, states = subject_at(mechanism, 12, kv_heads=1)
    tokens = text[12:]
    free = Decoder(model, states, 12, 2, CHECKED_TOKENS, static=False)
    fixed = Decoder(model, states, 12, 2, CHECKED_TOKENS, static=True)
    monkeypatch.setattr(decoder_module, "capture", lambda call: call)
    fixed.capture()
    assert fixed.captured

    def places():
        leaves = torch.utils._pytree.tree_leaves(fixed.states)
        return [x.data_ptr() for x in leaves if isinstance(x, torch.Tensor)]

    before = places()
    expected = free.read(tokens)
    assert torch.allclose(expected[0], expected[1], atol=1e-6)
    assert fixed.steps_follow == (mechanism != "softmax")
    count = CHECKED_TOKENS if fixed.steps_follow else 1
    for _ in range(2):
        assert torch.allclose(fixed.read(tokens[:count]), expected[:, :count], atol=1e-6)
        fixed.restart()
    assert places() == before
    free.restart()
    assert torch.equal(free.read(tokens), expected)


def test_beyond_its_reach_the_check_takes_the_same_precision():
    model, text, _ = subject_at("softmax", 30)
    truth = DecodingTruth(model, text, exact_up_to=12)
    exact = {T: truth.logits(truth.exact_model, T)[None].float() for T in (12, 30)}
    near, far = truth.check(exact[12], 12), truth.check(exact[30], 30)
    assert (near.ok, near.against) == (True, "fp64, 12 tokens at once")
    assert (far.ok, far.against) == (True, "30 tokens at once in the same precision")
    assert near.budget < far.budget < 2 * near.budget
    assert not truth.check(exact[30] * 1.001, 30).ok
    assert not truth.check(exact[30] * float("nan"), 30).ok
    assert DecodingTruth(model, text, exact_up_to=12).check(exact[30], 30) == far  # in whatever order


def test_models():
    with torch.device("meta"):
        model = create_model(FULL, "softmax", torch.device("meta"), 0)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(135e6, rel=0.01)
    # No second norm stands behind a mechanism that has one.
    for mechanism, normed in (("softmax", False), ("zeros", False), ("gated", True)):
        blocks = create_model(TINY, mechanism, CPU, 0).blocks
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
