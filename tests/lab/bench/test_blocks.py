"""`linattn memory`: what counts to the byte, blocks that are checked, and what does not fit."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from linattn.lab.bench.blocks import Blocks, checked_block, create_block, draw_tokens, training_pass
from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.models import StepTruth

CPU = torch.device("cpu")
SMALL = Blocks(tokens=(64, 256), mechanisms=("relu",), dim=16, heads=2, max_gib=1, device="cpu")


class Linear(nn.Linear):
    """Takes a plane like a block."""

    def forward(self, x, spatial_shape):
        return super().forward(x)


def test_what_counts_to_the_byte():
    """Input, output, their gradients and the weight's gradient count, the weight itself does not."""
    T, C = 50, 24
    peak = peak_bytes(training_pass(Linear(C, C, bias=False), torch.randn(1, T, C), autocast=False), CPU)
    assert peak == 4 * T * C * 4 + C * C * 4


def test_the_map_grows_with_the_square_and_linear_mechanisms_do_not():
    def growth(name):
        block = create_block(SMALL, name).blocks[0]
        peaks = [peak_bytes(training_pass(block, draw_tokens(SMALL, T), False), CPU) for T in (512, 1024)]
        return peaks[1] / peaks[0]

    assert growth("softmax (map)") > 3.5
    assert growth("mirror") < 2.1
    assert growth("nala") < 2.1


def test_a_checked_row_per_contender_and_number_of_tokens(rows_of, tmp_path):
    rows = rows_of(replace(SMALL, mechanisms=("softmax", "relu", "relu")), tmp_path)
    assert [(row["contender"], row["tokens"]) for row in rows[:3]] == [
        ("softmax", 64), ("softmax (map)", 64), ("relu", 64)
    ]  # fmt: skip
    assert len(rows) == 6
    for row in rows:
        assert row["status"] == "ok"
        assert 0 < row["error"] <= row["budget"] < 1e-5
        assert (row["repeats"], row["seconds"]) == (3, row["median_ms"] / 1000)
        # The same to the byte, measured apart: nothing of the run's own is in it.
        block = create_block(SMALL, row["contender"]).blocks[0]
        assert row["peak_bytes"] == peak_bytes(training_pass(block, draw_tokens(SMALL, row["tokens"]), False), CPU)
        softmax = next(r for r in rows if (r["tokens"], r["contender"]) == (row["tokens"], "softmax"))
        assert row["of_softmax"] == row["peak_bytes"] / softmax["peak_bytes"]


@pytest.mark.parametrize("name", ["softmax", "softmax (map)", "mirror", "nala", "relu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_check_passes_what_is_right_and_catches_what_is_not(monkeypatch, name, precision):
    config = replace(SMALL, dim=96, precision=precision)
    assert checked_block(config, name)[1].ok
    right, found = StepTruth.check, {}

    def more_gradient(module, inputs, which, share):
        return tuple(t + share * (t - t.detach()) if i == which else t for i, t in enumerate(inputs))

    def broken(self, host):
        mechanism, factor, share = host.blocks[0].attn.mechanism, *((1.001, 0.001) if precision == "fp32" else (2, 0.5))
        hooks = {"scaled": lambda: mechanism.register_forward_hook(lambda m, i, output: output * factor)}
        hooks["NaN"] = lambda: mechanism.register_forward_hook(lambda m, i, output: output * float("nan"))
        for which in range(3):  # right values with a wrong gradient of q, k or v
            hooks[f"gradient {which}"] = lambda own=which: mechanism.register_forward_pre_hook(
                lambda m, inputs: more_gradient(m, inputs, own, share)
            )
        for fault, register in hooks.items():
            hook = register()
            found[fault] = right(self, host).ok
            hook.remove()
        return right(self, host)

    monkeypatch.setattr(StepTruth, "check", broken)
    assert checked_block(config, name)[1].ok
    assert found == dict.fromkeys(["scaled", "NaN", "gradient 0", "gradient 1", "gradient 2"], False)


def test_a_wrong_block_is_not_measured(rows_of, monkeypatch, tmp_path):
    right = StepTruth.check

    def wrong(self, host):
        if host.blocks[0].attn.mechanism.info.name == "relu":
            host.blocks[0].attn.mechanism.register_forward_hook(lambda module, inputs, out: out * 2)
        return right(self, host)

    monkeypatch.setattr(StepTruth, "check", wrong)
    rows = rows_of(SMALL, tmp_path, code=1)
    assert {row["contender"] for row in rows if row["status"] == "WRONG"} == {"relu"}
    assert all(("peak_bytes" in row) == (row["contender"] != "relu") for row in rows)
