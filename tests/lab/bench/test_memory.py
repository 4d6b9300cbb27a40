import pytest
import torch
from linattn.lab.bench.inputs import make_inputs
from linattn.lab.bench.passes import FORWARD, TRAINING, make_fresh_call
from linattn.lab.bench.settings import BenchConfig

from linattn.lab.bench.contenders import make_contenders
from linattn.lab.bench.memory import free_bytes, peak_bytes

CPU = torch.device("cpu")


def test_peak_is_the_most_at_one_time_to_the_byte():
    def call():
        a = torch.empty(1000)  # 4000 bytes
        b = torch.empty(500)  # 6000 in use
        del a  # 2000
        c = torch.empty(700)  # 4800
        return b, c

    assert peak_bytes(call, CPU) == 6000


def test_result_counts_and_what_was_there_before_does_not():
    before = torch.empty(10_000)
    assert peak_bytes(lambda: before.double(), CPU) == 80_000
    assert peak_bytes(lambda: before.view(100, 100), CPU) == 0


def test_buffers_inside_one_op_count():
    # A chain of products makes one in between that no Python code ever sees.
    a = torch.ones(64, 64)
    peak = peak_bytes(lambda: torch.linalg.multi_dot([a, a, a]), CPU)
    assert peak >= 2 * a.nbytes


def test_repeats_give_the_same_bytes():
    def call():
        x = torch.randn(64, 64, requires_grad=True)
        return torch.autograd.grad((x @ x).relu().sum(), x)

    assert len({peak_bytes(call, CPU) for _ in range(3)}) == 1


@pytest.mark.parametrize("pass_name", [FORWARD, TRAINING])
def test_peak_of_a_pass_includes_inputs_and_gradients(pass_name):
    config = BenchConfig(heads=2, head_dim=16, impl=("recurrent",))
    inputs = make_inputs(config, 64)
    sdpa = make_contenders(config)[0]
    qkvo = 4 * inputs.q.nbytes
    least = qkvo if pass_name == FORWARD else 2 * qkvo  # their gradients too
    assert peak_bytes(make_fresh_call(sdpa, inputs, pass_name), CPU) >= least


def test_memory_grows_with_the_square_of_the_length_for_the_quadratic_form_only():
    config = BenchConfig(heads=2, head_dim=8, impl=("reference", "recurrent"))

    def peak(name, length):
        contender = {c.name: c for c in make_contenders(config)}[name]
        return peak_bytes(make_fresh_call(contender, make_inputs(config, length), FORWARD), CPU)

    assert peak("reference", 512) / peak("reference", 256) > 3.5
    assert peak("recurrent", 512) / peak("recurrent", 256) < 2.2


def test_free_bytes_is_a_sane_number():
    assert 2**20 < free_bytes(CPU) < 2**50
