import pytest
import torch

from linattn.lab.bench.attention import Attention
from linattn.lab.bench.contenders import make_contenders, make_inputs, weighed_call
from linattn.lab.bench.memory import Cost, extra_bytes, free_bytes, peak_bytes, predict

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


@pytest.mark.parametrize("training", [False, True])
def test_peak_of_a_pass_includes_inputs_and_gradients(training):
    config = Attention(heads=2, head_dim=16, impl=("recurrent",), device="cpu")
    inputs = make_inputs(config, 64)
    sdpa = make_contenders(config)[0]
    least = 4 * inputs.q.nbytes * (2 if training else 1)
    assert peak_bytes(weighed_call(sdpa, inputs, training), CPU) >= least


def test_memory_grows_with_the_square_of_the_length_for_the_quadratic_form_only():
    config = Attention(heads=2, head_dim=8, impl=("reference", "recurrent"), device="cpu")

    def peak(name, length):
        contender = {c.name: c for c in make_contenders(config)}[name]
        return peak_bytes(weighed_call(contender, make_inputs(config, length), False), CPU)

    assert peak("reference", 512) / peak("reference", 256) > 3.5
    assert peak("recurrent", 512) / peak("recurrent", 256) < 2.2


def test_free_bytes_is_a_sane_number():
    assert 2**20 < free_bytes(CPU) < 2**50


@pytest.mark.parametrize(("limit", "probed"), [(1e9, [32, 128, 512]), (300, [32, 128]), (1, [32])])
def test_costs_are_predicted_from_lengths_that_are_allowed(limit, probed):
    seen = []

    def probe(length):
        seen.append(length)
        return Cost(length, length / 100, 2.0 * length**2, (1, 2))

    found = predict(probe, 2048, limit / 100, 1e12)
    assert seen == probed
    assert (found.seconds, found.peak) == (pytest.approx(20.48), pytest.approx(2.0 * 2048**2))
    assert found.excess(20, 1e12) == "about 20.5 s a call, limit 20 s"
    assert found.excess(99, 2**20) == "about 0.00781 GiB, limit 0.000977 GiB"
    assert found.excess(99, 1e12) == ""
