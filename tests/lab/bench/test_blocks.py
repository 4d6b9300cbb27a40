"""`linattn memory`: what counts to the byte, blocks that are checked, and what does not fit."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lab.bench.running import rows_of
from linattn.lab.bench import blocks
from linattn.lab.bench.blocks import (
    Blocks,
    check_block,
    create_block,
    draw_tokens,
    near_square,
    reductions,
    training_pass,
)  # fmt: skip
from linattn.lab.bench.memory import peak_bytes

CPU = torch.device("cpu")
SMALL = Blocks(tokens=(64, 256), mechanisms=("relu",), dim=16, heads=2, repeats=1, max_gib=1, device="cpu")


class Linear(nn.Linear):
    """Takes a plane like a block."""

    def forward(self, x, spatial_shape):
        return super().forward(x)


def test_what_counts_to_the_byte():
    """Input, output, their gradients and the weight's gradient count, the weight itself does not."""
    T, C = 50, 24
    peak = peak_bytes(training_pass(Linear(C, C, bias=False), torch.randn(1, T, C), autocast=False), CPU)
    assert peak == 4 * T * C * 4 + C * C * 4
    block = create_block(replace(SMALL, dim=256), "relu")
    weights = sum(p.nbytes for p in block.parameters())
    source = draw_tokens(replace(SMALL, dim=256), 1, 1)
    assert weights <= peak_bytes(training_pass(block, source, autocast=False), CPU) < 1.1 * weights


def test_the_map_grows_with_the_square_and_linear_mechanisms_do_not():
    def growth(name):
        block = create_block(SMALL, name)
        peaks = [peak_bytes(training_pass(block, draw_tokens(SMALL, T, 1), False), CPU) for T in (512, 1024)]
        return peaks[1] / peaks[0]

    assert growth("softmax (map)") > 3.5
    assert growth("mirror") < 2.1
    assert growth("nala") < 2.1


def test_a_checked_row_per_contender_and_number_of_tokens(tmp_path):
    rows = rows_of(replace(SMALL, mechanisms=("softmax", "relu", "relu")), tmp_path)
    assert [(row["contender"], row["tokens"]) for row in rows[:3]] == [
        ("softmax", 64), ("softmax (map)", 64), ("relu", 64)
    ]  # fmt: skip
    assert len(rows) == 6
    for row in rows:
        assert row["status"] == "ok"
        assert 0 < row["error"] <= row["budget"] < 1e-5
        assert (row["repeats"], row["seconds"]) == (1, row["median_ms"] / 1000)
        # The same to the byte, measured apart: nothing of the run's own is in it.
        call = training_pass(
            create_block(SMALL, row["contender"]), draw_tokens(SMALL, row["tokens"], 1), autocast=False
        )
        assert row["peak_bytes"] == peak_bytes(call, CPU)


@pytest.mark.parametrize("name", ["softmax", "softmax (map)", "mirror", "nala", "relu"])
@pytest.mark.parametrize(("precision", "factor"), [("fp32", 1.0001), ("bf16", 1.1)])
def test_the_check_passes_what_is_right_and_catches_what_is_not(name, precision, factor):
    config = replace(SMALL, precision=precision)
    block = create_block(config, name)
    assert check_block(config, name, block).ok
    for wrong in (factor, float("nan")):
        hook = block.attn.mechanism.register_forward_hook(lambda module, inputs, output, wrong=wrong: output * wrong)
        assert not check_block(config, name, block).ok
        hook.remove()
    assert check_block(config, name, block).ok


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(("precision", "share"), [("fp32", 0.001), ("bf16", 0.1)])
def test_a_wrong_gradient_with_right_values_is_caught(which, precision, share):
    """In bf16 too, where rounding before the kink of a ReLU must not be taken for what the mechanism may err."""
    config = replace(SMALL, dim=96, precision=precision)
    block = create_block(config, "relu")

    def more_gradient(module, inputs):
        return tuple(t + share * (t - t.detach()) if i == which else t for i, t in enumerate(inputs))

    assert check_block(config, "relu", block).ok
    block.attn.mechanism.register_forward_pre_hook(more_gradient)
    verdict = check_block(config, "relu", block)
    assert not verdict.ok
    assert verdict.worst in (f"gradient of {'qkv'[which]}", "gradient of x")  # where it goes on to


def test_a_wrong_block_is_not_measured(monkeypatch, tmp_path):
    right = blocks.check_block

    def wrong(config, name, block):
        block.attn.mechanism.register_forward_hook(lambda module, inputs, out: out * (2 if name == "relu" else 1))
        return right(config, name, block)

    monkeypatch.setattr(blocks, "check_block", wrong)
    rows = rows_of(SMALL, tmp_path, code=1)
    assert {row["contender"] for row in rows if row["status"] == "WRONG"} == {"relu"}
    assert all(("peak_bytes" in row) == (row["contender"] != "relu") for row in rows)


def test_out_of_memory_is_a_row(monkeypatch, tmp_path):
    def passes(block, source, autocast):
        if block.attn.mechanism.impl == "reference" and source.shape[1] == 256:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 28.15 GiB")
        return training_pass(block, source, autocast)

    monkeypatch.setattr(blocks, "training_pass", passes)
    rows = {(row["contender"], row["tokens"]): row for row in rows_of(SMALL, tmp_path)}
    full = rows.pop(("softmax (map)", 256))
    assert (full["status"], full["reason"]) == ("out of memory", "Tried to allocate 28.15 GiB")
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert (tmp_path / "block-memory.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_too_much_is_predicted_and_left_out(monkeypatch, tmp_path):
    longest = {}

    def passes(block, source, autocast):
        impl = block.attn.mechanism.impl
        longest[impl] = max(longest.get(impl, 0), source.shape[1])
        return training_pass(block, source, autocast)

    monkeypatch.setattr(blocks, "training_pass", passes)
    rows = {row["contender"]: row for row in rows_of(replace(SMALL, tokens=(5000,), max_gib=0.03), tmp_path / "a")}
    assert rows["relu"]["status"] == "ok"
    assert rows["softmax (map)"]["status"] == "left out"
    assert rows["softmax (map)"]["reason"].endswith("GiB, limit 0.03 GiB")
    # 2 heads and 3 maps of fp32 at the peak: what was tried on the way stayed below the limit.
    assert 3 * 2 * 4 * longest["reference"] ** 2 < 0.03 * 2**30
    monkeypatch.setattr(blocks, "seconds_of", lambda call, device: 1.0)
    rows = rows_of(replace(SMALL, tokens=(32,), max_seconds=0.5), tmp_path / "b")
    assert {(row["status"], row["reason"]) for row in rows} == {("left out", "about 1 s a call, limit 0.5 s")}


def test_planes_are_near_squares():
    for tokens in (1, 2, 12, 97, 196, 6400, 70000):
        height, width = near_square(tokens)
        assert height * width == tokens
        assert height <= width
        assert not any(tokens % n == 0 for n in range(height + 1, int(tokens**0.5) + 1))


def test_forms_of_a_contender_share_their_weights():
    one, other = (create_block(SMALL, "relu", twin).state_dict() for twin in (False, True))
    assert all(torch.equal(one[name], other[name]) for name in one)
    different = create_block(replace(SMALL, seed=1), "relu").state_dict()
    assert not torch.equal(one["attn.qkv.weight"], different["attn.qkv.weight"])


def test_reductions_are_taken_where_both_fit():
    peaks = {
        ("softmax", 64): 100,
        ("softmax", 256): 400,
        ("softmax (map)", 64): 200,
        ("nala", 64): 50,
        ("nala", 256): 300,
    }
    rows = [{"contender": c, "tokens": T, "status": "ok", "peak_bytes": b} for (c, T), b in peaks.items()]
    rows.append({"contender": "softmax (map)", "tokens": 256, "status": "out of memory"})
    assert [(r["against"], r["tokens"], r["percent"]) for r in reductions(rows)] == [
        ("softmax (map)", 64, 75.0), ("softmax", 256, 25.0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "precision"),
    [({}, "fp32"), ({"precision": "bf16"}, "bf16"), ({"device": ""}, "fp32"), ({"precision": "fp32"}, "fp32")],
)
def test_auto_precision_is_that_of_training(options, precision):
    assert replace(SMALL, **options).filled().precision == precision
