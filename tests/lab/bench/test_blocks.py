import json
import weakref
from dataclasses import replace
from io import StringIO

import pytest
import torch
from linattn.lab.bench.blocks.check import check_block
from linattn.lab.bench.blocks.rows import BlocksResult
from linattn.lab.bench.blocks.run import number_of_block_rows, outcome, run_blocks
from linattn.lab.bench.blocks.screen import memory
from linattn.lab.bench.blocks.settings import BlocksConfig
from linattn.lab.bench.blocks.subjects import draw_tokens, make_block_contenders, near_square, training_pass
from linattn.lab.bench.screen import Files
from rich.console import Console
from torch import nn

from linattn.lab.bench.blocks import limits as blocks_limits
from linattn.lab.bench.blocks import run as blocks
from linattn.lab.bench.memory import peak_bytes
from linattn.support.options import OptionError

CPU = torch.device("cpu")
SMALL = BlocksConfig(tokens=(64, 256), mechanisms=("relu",), dim=16, heads=2, repeats=1, max_gib=1)
# What PyTorch says when a GPU is full, with the advice that follows.
FULL = (
    "CUDA out of memory. Tried to allocate 28.15 GiB. GPU 0 has a total capacity of 139.72 GiB of which 3.10 GiB is "
    "free. Including non-PyTorch memory, this process has 136.61 GiB memory in use. If reserved but unallocated memory "
    "is large try setting PYTORCH_CUDA_ALLOC_CONF"
)


def execute(config=SMALL, **hooks):
    return run_blocks(config, BlocksResult(config.describe(["test"])), **hooks)


def contender_of(name, config=SMALL):
    return next(c for c in make_block_contenders(config) if c.name == name)


def raise_at(monkeypatch, tokens, error, text):
    """Every pass of softmax with its map raises ``error`` at that many tokens; returns what it held then."""

    def passes(block, source, autocast):
        call = training_pass(block, source, autocast)

        def raises():
            big = torch.ones(1000)
            kept.append(weakref.ref(big))
            raise error(text)

        return raises if block.attn.mechanism.impl == "reference" and source.shape[1] == tokens else call

    kept = []
    monkeypatch.setattr(blocks, "training_pass", passes)
    monkeypatch.setattr(blocks_limits, "training_pass", passes)
    return kept


class Linear(nn.Linear):
    """Takes a plane like a block."""

    def forward(self, x, spatial_shape):
        return super().forward(x)


def test_what_counts_to_the_byte():
    """Input, output, their gradients and the weight's gradient count, the weight itself does not."""
    T, C = 50, 24
    source = torch.randn(1, T, C)
    one = T * C * 4
    peak = peak_bytes(training_pass(Linear(C, C, bias=False), source, autocast=False), CPU)
    assert peak == 4 * one + C * C * 4


def test_gradients_of_parameters_count_and_parameters_do_not():
    config = replace(SMALL, dim=256)
    block = contender_of("relu", config).create(config)
    weights = sum(p.nbytes for p in block.parameters())
    peak = peak_bytes(training_pass(block, draw_tokens(config, 1, 1), autocast=False), CPU)
    assert weights <= peak < 1.1 * weights


def test_the_map_grows_with_the_square_and_linear_mechanisms_do_not():
    config = replace(SMALL, mechanisms=("mirror", "nala"))

    def growth(name):
        block = contender_of(name, config).create(config)
        peaks = [peak_bytes(training_pass(block, draw_tokens(config, T, 1), False), CPU) for T in (512, 1024)]
        return peaks[1] / peaks[0]

    assert growth("softmax (map)") > 3.5
    for name in ("mirror", "nala"):
        assert growth(name) < 2.1


def test_a_checked_row_per_contender_and_number_of_tokens():
    seen = []
    result = execute(on_row=seen.append)
    assert seen == result.rows
    assert len(result.rows) == number_of_block_rows(SMALL) == 6
    assert [(r.contender, r.tokens) for r in result.rows[:3]] == [
        ("softmax", 64), ("softmax (map)", 64), ("relu", 64)
    ]  # fmt: skip
    for row in result.rows:
        block = contender_of(row.contender).create(SMALL)
        assert row.status == "ok"
        assert 0 < row.error <= row.budget < 1e-5
        assert row.repeats == 1
        assert row.seconds > 0
        # The same to the byte, measured apart: nothing of the run's own is in it.
        alone = peak_bytes(training_pass(block, draw_tokens(SMALL, row.tokens, 1), autocast=False), CPU)
        assert row.peak_bytes == alone


@pytest.mark.parametrize("name", ["softmax", "softmax (map)", "mirror", "nala", "relu"])
@pytest.mark.parametrize(("precision", "factor"), [("fp32", 1.0001), ("bf16", 1.1)])
def test_the_check_passes_what_is_right_and_catches_what_is_not(name, precision, factor):
    config = replace(SMALL, mechanisms=("mirror", "nala", "relu"), precision=precision)
    contender = contender_of(name, config)
    block = contender.create(config)
    assert check_block(contender, block, config).ok
    hook = block.attn.mechanism.register_forward_hook(lambda module, inputs, output: output * factor)
    assert not check_block(contender, block, config).ok
    hook.remove()
    hook = block.attn.mechanism.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    assert not check_block(contender, block, config).ok
    hook.remove()
    assert check_block(contender, block, config).ok


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(("precision", "share"), [("fp32", 0.001), ("bf16", 0.1)])
def test_a_wrong_gradient_with_right_values_is_caught(which, precision, share):
    """In bf16 too, where rounding before the kink of a ReLU must not be taken for what the mechanism may err."""
    config = replace(SMALL, dim=96, precision=precision)
    contender = contender_of("relu", config)
    block = contender.create(config)

    def more_gradient(module, inputs):
        return tuple(t + share * (t - t.detach()) if i == which else t for i, t in enumerate(inputs))

    assert check_block(contender, block, config).ok
    block.attn.mechanism.register_forward_pre_hook(more_gradient)
    verdict = check_block(contender, block, config)
    assert not verdict.ok
    assert verdict.worst in (f"gradient of {'qkv'[which]}", "gradient of x")  # where it goes on to


def test_a_wrong_block_is_not_measured(monkeypatch, tmp_path):
    right = blocks.check_block

    def wrong(contender, block, config):
        block.attn.mechanism.register_forward_hook(lambda module, inputs, out: out * (2 - (contender.name != "relu")))
        return right(contender, block, config)

    monkeypatch.setattr(blocks, "check_block", wrong)
    screen = StringIO()
    files = Files.in_folder(tmp_path, "m", chart=False)
    assert memory(SMALL, files, Console(file=screen, width=160)) == 1
    rows = json.loads(files.json.read_text())["rows"]
    assert {(row["contender"], row["status"]) for row in rows} == {
        ("softmax", "ok"), ("softmax (map)", "ok"), ("relu", "WRONG")
    }  # fmt: skip
    assert {row["peak_bytes"] for row in rows if row["contender"] == "relu"} == {None}
    assert "WRONG" in screen.getvalue()


def test_out_of_memory_is_a_row_and_frees_what_was_taken(monkeypatch, tmp_path):
    kept = raise_at(monkeypatch, 256, torch.OutOfMemoryError, FULL)
    still_held = []
    result = execute(on_row=lambda row: still_held.extend(ref for ref in kept if ref() is not None))
    rows = {(row.contender, row.tokens): row for row in result.rows}
    full = rows["softmax (map)", 256]
    assert kept
    assert not still_held
    assert full.status == "out of memory"
    assert full.reason.startswith("Tried to allocate 28.15 GiB. GPU 0 has a total capacity of 139.72 GiB")
    assert full.reason.endswith("3.10 GiB is free")
    assert full.peak_bytes is None
    assert rows["relu", 256].status == "ok"
    assert result.right
    assert memory(SMALL, Files.in_folder(tmp_path, "m", chart=True), Console(file=StringIO(), width=160)) == 0
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


def test_another_error_fails_alone(monkeypatch):
    raise_at(monkeypatch, 256, RuntimeError, "no such\nkernel")
    result = execute()
    failed = [row for row in result.rows if row.status != "ok"]
    assert [(row.contender, row.tokens, row.status, row.reason) for row in failed] == [
        ("softmax (map)", 256, "failed", "RuntimeError: no such kernel")
    ]
    assert not result.right


def test_a_full_cpu_is_out_of_memory_too():
    text = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
    assert outcome(RuntimeError(text))[0] == "out of memory"
    assert outcome(ValueError("else"))[0] == "failed"


def test_ctrl_c_keeps_finished_rows(monkeypatch, tmp_path):
    raise_at(monkeypatch, 256, KeyboardInterrupt, "")
    screen = StringIO()
    files = Files.in_folder(tmp_path, "m", chart=True)
    assert memory(SMALL, files, Console(file=screen, width=160)) == 130
    data = json.loads(files.json.read_text())
    assert data["meta"]["interrupted"] is True
    assert [(row["contender"], row["tokens"]) for row in data["rows"]] == [
        ("softmax", 64), ("softmax (map)", 64), ("relu", 64), ("softmax", 256)
    ]  # fmt: skip
    assert "interrupted" in screen.getvalue()
    assert files.chart.exists()


def test_rows_are_on_disk_while_the_run_goes_on(monkeypatch, tmp_path):
    files, counts = Files.in_folder(tmp_path, "m", chart=False), []
    right = blocks.training_pass

    def count(*args):
        counts.append(len(json.loads(files.json.read_text())["rows"]) if files.json.exists() else 0)
        return right(*args)

    monkeypatch.setattr(blocks, "training_pass", count)
    memory(SMALL, files, Console(file=StringIO()))
    assert counts == [0, 1, 2, 3, 4, 5]


def test_too_much_memory_is_predicted_and_left_out(monkeypatch):
    longest = {}

    def passes(block, source, autocast):
        impl, tokens = block.attn.mechanism.impl, source.shape[1]
        longest[impl] = max(longest.get(impl, 0), tokens)
        return training_pass(block, source, autocast)

    monkeypatch.setattr(blocks, "training_pass", passes)
    monkeypatch.setattr(blocks_limits, "training_pass", passes)
    rows = {row.contender: row for row in execute(replace(SMALL, tokens=(5000,), max_gib=0.03)).rows}
    assert rows["relu"].status == "ok"
    assert rows["softmax (map)"].status == "left out"
    assert "GiB, limit 0.03 GiB" in rows["softmax (map)"].reason
    # 2 heads and 3 maps of fp32 at the peak: what was tried on the way stayed below the limit.
    assert 3 * 2 * 4 * longest["reference"] ** 2 < 0.03 * 2**30


def test_slow_passes_are_left_out_by_time(monkeypatch):
    monkeypatch.setattr(blocks_limits, "seconds_of", lambda call, device: 1.0)
    result = execute(replace(SMALL, max_seconds=0.5))
    assert {row.status for row in result.rows} == {"left out"}
    assert result.rows[0].reason == "about 1 s a pass, limit 0.5 s"
    assert result.right


def test_planes_are_near_squares():
    for tokens in (1, 2, 12, 97, 196, 6400, 70000):
        height, width = near_square(tokens)
        assert height * width == tokens
        assert height <= width
        assert not any(tokens % n == 0 for n in range(height + 1, int(tokens**0.5) + 1))


def test_forms_of_a_contender_share_their_weights():
    contender = contender_of("relu")
    one, other = (contender.create(SMALL, impl).state_dict() for impl in ("auto", "reference"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    different = contender.create(replace(SMALL, seed=1)).state_dict()
    assert not torch.equal(one["attn.qkv.weight"], different["attn.qkv.weight"])


def test_softmax_is_there_once():
    names = [c.name for c in make_block_contenders(replace(SMALL, mechanisms=("softmax", "relu", "relu")))]
    assert names == ["softmax", "softmax (map)", "relu"]


def test_meta_says_what_was_done():
    meta = replace(SMALL, seed=5).describe(["linattn", "memory"])
    assert meta.keys() >= {"device", "cpu", "threads", "versions", "command", "date", "seed", "settings", "counted"}
    assert (meta["command"], meta["seed"]) == ("linattn memory", 5)
    assert meta["settings"]["precision"] == "fp32"  # what auto became


@pytest.mark.parametrize(
    ("device", "precision", "autocast"),
    [("cpu", "auto", False), ("cuda", "auto", True), ("cpu", "bf16", True), ("cuda", "fp32", False)],
)
def test_auto_precision_is_that_of_training(device, precision, autocast):
    assert replace(SMALL, device=device, precision=precision).autocast is autocast


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"tokens": ()}, "tokens"),
        ({"tokens": (0,)}, "tokens"),
        ({"mechanisms": ()}, "mechanisms"),
        ({"mechanisms": ("nobody",)}, "mechanisms"),
        ({"mechanisms": ("pola",), "dim": 15, "heads": 3}, "mechanisms"),  # it halves a head's channels
        ({"heads": 3}, "heads"),
        ({"batch": 0}, "batch"),
        ({"precision": "fp8"}, "precision"),
        ({"device": "tpu"}, "device"),
        ({"max_gib": 0}, "max_gib"),
    ],
)
def test_wrong_settings_name_the_option(change, option):
    with pytest.raises(OptionError) as caught:
        replace(SMALL, **change).check()
    assert caught.value.option == option
