import pytest
import torch
from linattn.lab.bench.kernels.cases import CASES, OURS, Case, Goal, select
from linattn.lab.bench.kernels.floor import (
    Ceilings,
    backward_work,
    floor_ms,
    forward_work,
    measure_ceilings,
    operations,
    qkvo_bytes,
)
from linattn.lab.bench.kernels.problems import draw

from linattn.support.options import OptionError

CPU = torch.device("cpu")


def case(family="attention", B=2, H=3, T=8, K=4, V=6, **options):
    return Case("x", family, B, H, T, K, V, **options)


def drawn(of, dtype=torch.bfloat16):
    return draw(of, CPU, dtype, seed=0)


def test_bytes_are_inputs_read_once_and_outputs_written_once():
    causal = case()
    tokens = 2 * 3 * 8
    tensors = drawn(causal)
    assert forward_work(causal, tensors).nbytes == tokens * (2 * 4 + 2 * 6) * 2
    assert backward_work(causal, tensors).nbytes == tokens * (4 * 4 + 3 * 6) * 2
    assert qkvo_bytes(causal, tensors) == tokens * (2 * 4 + 2 * 6) * 2


def test_gates_are_read_in_fp32_and_their_gradients_written():
    plain, token, channel = case(), case(decay="token"), case(decay="channel")
    tokens = 2 * 3 * 8
    for gated, width in ((token, 1), (channel, 4)):
        tensors = drawn(gated)
        base = drawn(plain)
        assert forward_work(gated, tensors).nbytes - forward_work(plain, base).nbytes == tokens * width * 4
        assert backward_work(gated, tensors).nbytes - backward_work(plain, base).nbytes == tokens * width * 8
        assert qkvo_bytes(gated, tensors) == qkvo_bytes(plain, base)
    head = case(decay="head")
    assert backward_work(head, drawn(head)).nbytes == backward_work(plain, drawn(plain)).nbytes + 3 * 4


def test_a_step_reads_and_writes_its_state():
    step = case("step", T=1, normalized=True, backward=False)
    heads = 2 * 3
    state = heads * (4 * 6 + 4) * 4
    assert forward_work(step, drawn(step)).nbytes == heads * (2 * 4 + 2 * 6) * 2 + 2 * state


def test_a_convolution_moves_x_twice_and_its_taps_once():
    convolution = case("convolution", H=1, taps=4)
    assert forward_work(convolution, drawn(convolution)).nbytes == (2 * 2 * 8 * 4 + 4 * 4 + 4) * 2
    assert operations(convolution) == (2 * 4 * 2 * 8 * 4, 4 * 4 * 2 * 8 * 4)


def test_operations_against_counts_by_hand():
    tokens, KV = 2 * 3 * 8, 4 * 6
    assert operations(case(causal=False)) == (4 * KV * tokens, 8 * KV * tokens)
    forward, backward = operations(case())
    assert forward == (4 * KV + 17 * 10) * tokens
    assert backward == (10 * KV + 17 * (12 + 12)) * tokens
    assert operations(case(normalized=True)) == operations(case(V=7))
    forward, backward = operations(case(causal=False, decay="token"))
    assert forward == (8 * KV + 2 * 16 * 10) * tokens
    assert backward == (20 * KV + 2 * 16 * (12 + 12)) * tokens
    assert operations(case("exponential", decay="token")) == operations(case(V=7, decay="token"))
    assert operations(case("step", T=1)) == (6 * KV * 6, 0)
    relu = case("mechanism", V=4, causal=False, normalized=True, mechanism="relu")
    assert operations(relu) == (4 * 4 * 5 * tokens, 8 * 4 * 5 * tokens)


def test_the_larger_bound_is_the_floor_and_both_passes_add_up():
    causal = case()
    tensors = drawn(causal)
    forward, backward = forward_work(causal, tensors), backward_work(causal, tensors)
    slow_memory = floor_ms(causal, tensors, Ceilings(bandwidth=1e3, matmul=1e30))
    assert slow_memory["forward"] == pytest.approx(forward.nbytes)
    assert slow_memory["forward+backward"] == pytest.approx(forward.nbytes + backward.nbytes)
    slow_units = floor_ms(causal, tensors, Ceilings(bandwidth=1e30, matmul=1e3))
    assert slow_units["forward"] == pytest.approx(forward.operations)


def test_the_documented_floor_of_the_first_causal_shape():
    # 4 tensors of 8 x 16 x 4096 x 128 in bf16 at 4.3 TB/s: the 0.125 ms of the measured peers.
    (wide,) = select(("causal-4096",))
    small = Case(wide.name, wide.family, 1, 1, 64, 128, 128)
    factor = (wide.B * wide.H * wide.T) / 64
    floor = floor_ms(small, drawn(small), Ceilings(4.3e12, 7e14))["forward"] * factor
    assert floor == pytest.approx(0.1249, rel=1e-3)


def test_ceilings_are_measured():
    ceilings = measure_ceilings(CPU, small=True)
    assert ceilings.bandwidth > 1e8
    assert ceilings.matmul > 1e8


def test_the_table_of_cases_is_sane():
    names = [c.name for c in CASES]
    assert len(set(names)) == len(names) == 37
    assert {c.mechanism for c in CASES} == {"", "relu", "pola", "nala", "mirror", "quadratic"}
    assert {c.decay for c in CASES} == {"none", "head", "token", "channel"}
    for c in CASES:
        for goal in (*c.forward, *c.training):
            assert goal.limit > 0
            assert not goal.case or (goal.against == OURS and goal.case in names)
            assert str(goal).startswith("<= ")
        small = c.reduced()
        assert small.B * small.H * small.T**2 * (small.K if c.decay == "channel" else 1) <= 2**27
        assert (small.K, small.V) == (c.K, c.V)
        assert small.T % 128 == 0 or small.T == c.T
        quick = c.quick()
        assert quick.name == c.name
        assert quick.T <= 64
        assert not quick.forward


def test_the_goals_of_the_issue_are_there():
    (relu,) = select(("relu-196",))
    assert relu.forward == (Goal(1.6, "floor"), Goal(1.0, "SDPA flash"))
    (step,) = select(("step-64",))
    assert step.forward[0].limit == pytest.approx(1 / 0.7)
    assert (step.B, step.H, step.K) == (64, 32, 128)


def test_cases_are_chosen_by_name_or_beginning():
    assert [c.name for c in select(("relu-70000", "causal-4096"))] == ["causal-4096", "relu-70000"]
    assert len(select(("pola-*",))) == 4
    assert len(select(())) == len(CASES)
    with pytest.raises(OptionError, match="must be one of"):
        select(("causal",))
