import pytest
import torch

from linattn.lab.bench.memory import check_affordable, extra_bytes, free_bytes, peak_bytes
from linattn.lab.bench.timing import Unmeasured

CPU = torch.device("cpu")


def test_peak_is_the_most_at_one_time_to_the_byte():
    def call():
        a = torch.empty(1000)  # 4000 bytes
        b = torch.empty(500)  # 6000 in use
        del a  # 2000
        c = torch.empty(700)  # 4800
        return b, c

    assert peak_bytes(call, CPU) == 6000
    assert extra_bytes(call, CPU) == 6000 - 4800


def test_result_counts_and_what_was_there_before_does_not():
    before = torch.empty(10_000)
    assert peak_bytes(lambda: before.double(), CPU) == 80_000
    assert peak_bytes(lambda: before.view(100, 100), CPU) == 0
    assert extra_bytes(lambda: (before.double(), before.view(100, 100)), CPU) == 0


def test_buffers_inside_one_op_count():
    # A chain of products makes one in between that no Python code ever sees.
    a = torch.ones(64, 64)
    assert peak_bytes(lambda: torch.linalg.multi_dot([a, a, a]), CPU) >= 2 * a.nbytes


def test_repeats_give_the_same_bytes():
    def call():
        x = torch.randn(64, 64, requires_grad=True)
        return torch.autograd.grad((x @ x).relu().sum(), x)

    assert len({peak_bytes(call, CPU) for _ in range(3)}) == 1


def test_free_bytes_is_a_sane_number():
    assert 2**20 < free_bytes(CPU) < 2**50


def test_costs_are_predicted_from_lengths_that_are_allowed():
    seen = []

    def probe(length):
        seen.append(length)
        return length / 100, 2.0 * length**2

    check_affordable(probe, 500, 20.48, 1e12)
    assert seen == [64, 128, 256]
    seen.clear()
    with pytest.raises(Unmeasured, match=r"about 10\.2 s a call at 512 tokens, limit 10 s") as caught:
        check_affordable(probe, 2048, 10, 1e12)
    assert caught.value.status == "left out"
    assert seen == [64, 128, 256]
    with pytest.raises(Unmeasured, match=r"about 0\.000122 GiB at 256 tokens, limit 0\.0001 GiB"):
        check_affordable(probe, 2048, 1e9, 0.0001 * 2**30)
    check_affordable(probe, 64, 0, 0)  # nothing shorter could tell
