import pytest
import torch

from linattn.lab.bench import memory
from linattn.lab.bench.memory import check_affordable, extra_bytes, peak_bytes
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


def test_costs_are_predicted_from_lengths_that_are_allowed(monkeypatch):
    seen = []
    monkeypatch.setattr(memory, "seconds_of", lambda call, device: call() / 100)
    monkeypatch.setattr(memory, "peak_bytes", lambda call, device: 2.0 * call() ** 2)

    def check(length, max_seconds, max_gib, weigh=True):
        seen.clear()

        def calls_at(n):
            seen.append(n)
            return lambda: n, (lambda: n) if weigh else None

        check_affordable(calls_at, length, CPU, max_seconds, max_gib)

    check(500, 20.48, 1e3)
    assert seen == [64, 128, 256]
    with pytest.raises(Unmeasured, match=r"about 10\.2 s a call at 512 tokens, limit 10 s") as caught:
        check(2048, 10, None)
    assert caught.value.status == "left out"
    assert seen == [64, 128, 256]
    with pytest.raises(Unmeasured, match=r"about 0\.000122 GiB at 256 tokens, limit 0\.0001 GiB"):
        check(2048, 1e9, 0.0001)
    check(2048, 1e9, 0.0001, weigh=False)
    check(64, 0, 0)  # nothing shorter could tell
