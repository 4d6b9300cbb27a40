import json
from dataclasses import replace
from io import StringIO

import pytest
import torch
from linattn.lab.bench.decoding.cache import use_static_cache
from linattn.lab.bench.decoding.check import CHECKED_TOKENS, DecodingTruth
from linattn.lab.bench.decoding.decoder import Decoder
from linattn.lab.bench.decoding.prefix import Prefix
from linattn.lab.bench.decoding.rows import DecodingResult, DecodingRow
from linattn.lab.bench.decoding.run import DecodingSubject, run_decoding
from linattn.lab.bench.decoding.screen import decoding
from linattn.lab.bench.decoding.settings import DecodingConfig
from linattn.lab.bench.language.apart import run_apart
from linattn.lab.bench.language.model import create_model, draw_text
from linattn.lab.bench.language.sizes import FULL, TINY
from rich.console import Console

from lab.bench import fake_language as fake
from linattn.lab.bench.decoding import decoder as decoder_module
from linattn.lab.bench.decoding import run as run_module
from linattn.support.options import OptionError

CPU = torch.device("cpu")
SMALL = DecodingConfig(
    device="cpu", mechanisms=("gated",), dtype="float32", quick=True, contexts=(12, 30), batches=(1, 2),
    modes=("eager",), steps=2, piece=8,
)  # fmt: skip


def opened(config):
    result = DecodingResult(config.describe(["test"]))
    result.meta["runs"] = [{"date": "", "command": ""}]
    return result


def subject_at(mechanism, context, kv_heads=2):
    size = replace(TINY, kv_heads=kv_heads)
    model = create_model(size, mechanism, CPU, 0).eval()
    if mechanism == "softmax":
        use_static_cache(model)
    text = draw_text(size, (context + CHECKED_TOKENS,), CPU, 0)
    return model, text, Prefix(model, text, 8).reach(context)


def test_every_row_is_checked_timed_and_weighed():
    result, seen = opened(SMALL), []
    run_decoding(SMALL, result, on_row=seen.append)
    assert seen == result.rows
    assert [row.key[:3] for row in seen] == [(m, T, b) for m in ("softmax", "gated") for T in (12, 30) for b in (1, 2)]
    layers, heads, D = TINY.depth, TINY.heads, TINY.width // TINY.heads
    for row in seen:
        assert row.status == "ok", row.reason
        assert 0 < row.error <= row.budget < 1e-4
        assert row.checked_against == f"fp64, {row.context} tokens at once"
        assert 0 < row.p20_ms <= row.median_ms <= row.p80_ms
        assert row.tokens_per_second == pytest.approx(1000 * row.batch / row.median_ms)
        numbers = 2 * row.context * D if row.mechanism == "softmax" else D * (D + 1)
        assert row.state_bytes == 4 * layers * row.batch * heads * numbers
        weights = sum(p.numel() for p in create_model(TINY, row.mechanism, CPU, 0).parameters())
        assert row.weight_bytes == 4 * weights
        assert row.total_bytes == row.weight_bytes + row.state_bytes + row.peak_bytes
        assert sum(row.explain.values()) == layers
    written = result.as_json()
    assert {(g["mechanism"], g["batch"]): g["state"] for g in written["growth"]} == {
        ("softmax", 1): 2.5, ("gated", 1): 1.0, ("softmax", 2): 2.5, ("gated", 2): 1.0,
    }  # fmt: skip
    assert written["rows"][0]["total_bytes"] == seen[0].total_bytes


@pytest.mark.parametrize("fault", ["the state is not handed on", "the position stays"])
def test_a_broken_step_is_wrong_and_is_not_timed(monkeypatch, fault):
    right = Decoder._step

    def broken(self):
        states, position = self.states, self.position.clone()
        right(self)
        if fault == "the position stays":
            self.position.copy_(position)
        else:
            self.states = states

    monkeypatch.setattr(Decoder, "_step", broken)
    result = run_decoding(replace(SMALL, contexts=(12,), batches=(2,)), opened(SMALL))
    statuses = {row.mechanism: row.status for row in result.rows}
    assert statuses == {"softmax": "WRONG", "gated": "WRONG"}
    assert not result.right
    for row in result.rows:
        assert row.median_ms is None
        assert row.error > 10 * row.budget
        assert row.reason.startswith("logits of sequence")


@pytest.mark.parametrize("mechanism", ["mlstm", "zeros", "softmax"])
def test_states_that_stay_in_their_memory_give_the_same(monkeypatch, mechanism):
    """What a CUDA graph replays, here called: states are overwritten, a cache writes one slot again and again."""
    model, text, states = subject_at(mechanism, 12, kv_heads=1)
    tokens = text[12:]
    free = Decoder(model, states, 12, 2, CHECKED_TOKENS, static=False)
    fixed = Decoder(model, states, 12, 2, CHECKED_TOKENS, static=True)
    monkeypatch.setattr(decoder_module, "capture", lambda call: call)
    assert fixed.capture()
    places = [x.data_ptr() for x in torch.utils._pytree.tree_leaves(fixed.states) if isinstance(x, torch.Tensor)]
    expected = free.read(tokens)
    assert torch.allclose(expected[0], expected[1], atol=1e-6)
    assert fixed.steps_that_follow == (mechanism != "softmax")
    count = CHECKED_TOKENS if fixed.steps_that_follow else 1
    for _ in range(2):
        assert torch.allclose(fixed.read(tokens[:count]), expected[:, :count], atol=1e-6)
        fixed.restart()
    assert places == [
        x.data_ptr() for x in torch.utils._pytree.tree_leaves(fixed.states) if isinstance(x, torch.Tensor)
    ]
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


def test_resumed_left_out_and_out_of_memory(monkeypatch, tmp_path):
    path, screen = tmp_path / "decoding.json", StringIO()
    config = replace(SMALL, contexts=(12,))
    console = Console(file=screen, width=150)
    right, filled = DecodingSubject.fill, []

    def fill(self, row):
        filled.append(row.key[::2])
        if row.batch == 2 and row.mechanism == "softmax":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full. And so on")
        if row.batch == 2 and len(filled) == 4:
            raise KeyboardInterrupt
        right(self, row)

    monkeypatch.setattr(run_module.DecodingSubject, "fill", fill)
    assert decoding(config, path, console) == 130
    first = json.loads(path.read_text())
    assert [(r["mechanism"], r["batch"], r["status"]) for r in first["rows"]] == [
        ("softmax", 1, "ok"), ("softmax", 2, "out of memory"), ("gated", 1, "ok"),
    ]  # fmt: skip
    assert first["rows"][1]["reason"] == "Tried to allocate 2.00 GiB. GPU 0 is full"
    assert decoding(replace(config, seconds=1e-9), path, console, resume=True) == 0
    assert json.loads(path.read_text())["rows"][3]["status"] == "left out"
    assert "left out for want of time" in screen.getvalue()
    del filled[:]
    assert decoding(config, path, console, resume=True) == 0
    assert filled == [("gated", 2)]
    last = json.loads(path.read_text())
    assert last["rows"][:3] == first["rows"]
    assert last["rows"][3]["status"] == "ok"
    assert [run["command"] for run in last["meta"]["runs"]] == [last["meta"]["command"]] * 3
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(OptionError, match="other settings"):
        decoding(replace(config, seed=1), path, console, resume=True)


def test_crossovers_and_the_chart_of_made_up_rows(tmp_path):
    from linattn.lab.bench.decoding.chart import decoding_figure, draw_decoding_chart

    result = DecodingResult(replace(SMALL, quick=False).describe(["test"]))
    flat, slow, early = 2 * 2**0.5, 9.0, 0.5
    for T, ms in ((1024, 1.0), (2048, 2.0), (4096, 4.0), (8192, 8.0)):
        for name, own in (("softmax", ms), ("gated", flat), ("zeros", slow), ("elu", early)):
            sizes = {"state_bytes": T if name == "softmax" else 100, "weight_bytes": 2**20, "peak_bytes": 10}
            result.put(DecodingRow(name, median_ms=own, context=T, batch=1, mode="cuda-graph", **sizes))
    result.put(DecodingRow("softmax", "out of memory", context=16384, batch=1, mode="cuda-graph"))
    result.put(DecodingRow("gated", "WRONG", median_ms=0.1, context=16384, batch=1, mode="cuda-graph"))
    found = {c.mechanism: c for c in result.crossovers()}
    assert found["gated"].length == pytest.approx(2048 * 2**0.5)
    assert (found["gated"].longest, found["gated"].gain) == (8192, 8 / flat)
    assert (found["zeros"].length, found["elu"].length) == (None, 1024)
    assert str(found["gated"]).startswith("gated, batch 1, cuda-graph: faster than softmax from 2,896 tokens on (2.83x")
    assert "not faster than softmax up to 8,192" in str(found["zeros"])
    growth = {g["mechanism"]: g for g in result.growth()}
    assert (growth["gated"]["time"], growth["gated"]["state"], growth["softmax"]["state"]) == (1, 1, 8)
    figure = decoding_figure(result)
    time_lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert list(time_lines["gated"].get_ydata()) == [flat] * 4  # the wrong row is not drawn
    assert any("out of memory" in text.get_text() for text in figure.axes[0].texts)
    marked = {text.get_text() for text in figure.axes[0].texts}
    assert " 2,896" in marked
    assert " 1,024" not in marked  # faster wherever it was measured: nothing to mark
    path = tmp_path / "chart.png"
    assert draw_decoding_chart(result, path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert not draw_decoding_chart(DecodingResult(result.meta), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.usefixtures("quick_children")
def test_a_crash_costs_one_row():
    config = replace(SMALL, contexts=(12,), batches=(1,))
    result, rows = opened(config), []
    run_apart(
        run_decoding, config, result, on_row=rows.append, on_work=lambda what: None,
        target=fake.decoding_that_crashes_once,
    )  # fmt: skip
    assert [(row.mechanism, row.status) for row in rows] == [("softmax", "failed"), ("gated", "ok")]
    assert rows[0].reason == "the process was ended by SIGKILL"


def test_the_model_has_135_million_parameters():
    with torch.device("meta"):
        model = create_model(FULL, "softmax", torch.device("meta"), 0)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(135e6, rel=0.01)


@pytest.mark.parametrize(("mechanism", "normed"), [("softmax", False), ("zeros", False), ("gated", True)])
def test_no_second_norm_stands_behind_a_mechanism(mechanism, normed):
    model = create_model(TINY, mechanism, CPU, 0)
    assert [block.attn.norm is not None for block in model.blocks] == [normed] * len(model.blocks)


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"mechanisms": ("agent",)}, "mechanisms"),
        ({"contexts": ()}, "contexts"),
        ({"batches": (0,)}, "batch"),
        ({"modes": ("fast",)}, "modes"),
        ({"modes": ()}, "modes"),
        ({"dtype": "float16"}, "dtype"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"seconds": 0}, "seconds"),
        ({"piece": 0}, "piece"),
    ],
)
def test_wrong_settings_name_the_option(change, option):
    with pytest.raises(OptionError) as caught:
        replace(SMALL, **change).check()
    assert caught.value.option == option
