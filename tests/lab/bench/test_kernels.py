"""`linattn kernels`: floors and goals by hand, rivals in their own layouts, rows that are checked at both sizes."""

import json
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from linattn.lab.bench import kernels
from linattn.lab.bench.kernel_cases import BY_NAME, CASES, OURS, Goal, outcomes, select
from linattn.lab.bench.kernels import (
    Kernels,
    floors,
    measure_ceilings,
    operations,
    output_bytes,
    qkvo_bytes,
    size,
)
from linattn.lab.bench.problems import Bound, Problem, Truth, bind_form, bind_softmax, draw
from linattn.lab.bench.rivals import Contender, make_contenders
from linattn.ops.exponential.api import exponential_attention
from linattn.ops.linear.api import linear_attention, linear_attention_with_state
from linattn.ops.shared.types import LinearState
from linattn.support.options import OptionError

CPU = torch.device("cpu")
# Without kernels: what is tested is the race, and the interpreter is slow.
SMALL = Kernels(device="cpu", only=("causal-4096", "relu-196"), contenders=("linattn chunked", "fla"), quick=True)


def case(family="attention", B=2, H=3, T=8, K=4, V=6, **options):
    return Problem("x", family, B, H, T, K, V, **options)


def moved(of):
    """Bytes of forward and of backward, from floors at a bandwidth of 1 byte a millisecond."""
    tensors, _ = draw(of, CPU, torch.bfloat16, 0)
    found = floors(of, tensors, 1e3, 1e30)
    return pytest.approx(found["forward"]), pytest.approx(found["forward+backward"] - found["forward"])


def test_inputs_are_read_once_and_outputs_written_once():
    tokens = 2 * 3 * 8
    assert moved(case()) == (tokens * (2 * 4 + 2 * 6) * 2, tokens * (4 * 4 + 3 * 6) * 2)
    for decay, width in (("token", 1), ("channel", 4)):  # gates in fp32, and their gradients
        forward, backward = tokens * (2 * 4 + 2 * 6) * 2, tokens * (4 * 4 + 3 * 6) * 2
        assert moved(case(decay=decay)) == (forward + tokens * width * 4, backward + tokens * width * 8)
    assert moved(case(decay="head"))[1] == tokens * (4 * 4 + 3 * 6) * 2 + 3 * 4
    step, state = case("step", T=1, normalized=True), 2 * 3 * (4 * 6 + 4) * 4
    assert moved(step)[0] == 2 * 3 * (2 * 4 + 2 * 6) * 2 + 2 * state
    convolution = case("convolution", H=1, taps=4)
    assert moved(convolution)[0] == (2 * 2 * 8 * 4 + 4 * 4 + 4) * 2
    tensors, _ = draw(case(decay="token"), CPU, torch.bfloat16, 0)
    assert qkvo_bytes(case(decay="token"), tensors) == tokens * (2 * 4 + 2 * 6) * 2
    assert size({"v": tensors["v"]}) == output_bytes(case(), tensors) == tokens * 6 * 2


def test_operations_against_counts_by_hand():
    tokens, KV = 2 * 3 * 8, 4 * 6
    assert operations(case(causal=False)) == (4 * KV * tokens, 8 * KV * tokens)
    assert operations(case()) == ((4 * KV + 17 * 10) * tokens, (10 * KV + 17 * (12 + 12)) * tokens)
    assert operations(case(normalized=True)) == operations(case(V=7))
    both = ((8 * KV + 2 * 16 * 10) * tokens, (20 * KV + 2 * 16 * (12 + 12)) * tokens)
    assert operations(case(causal=False, decay="token")) == both
    assert operations(case("exponential", decay="token")) == operations(case(V=7, decay="token"))
    assert operations(case("step", T=1)) == (6 * KV * 6, 0)
    assert operations(case("convolution", H=1, taps=4)) == (2 * 4 * 2 * 8 * 4, 4 * 4 * 2 * 8 * 4)
    relu = case("mechanism", V=4, causal=False, normalized=True, mechanism="relu")
    assert operations(relu) == (4 * 4 * 5 * tokens, 8 * 4 * 5 * tokens)
    tensors, _ = draw(case(), CPU, torch.bfloat16, 0)
    ceilings = measure_ceilings(CPU, small=True)
    assert min(ceilings["copy_bytes_per_second"], ceilings["matmul_per_second"]) > 1e8
    slow_units = floors(case(), tensors, 1e30, 1e3)
    assert slow_units["forward"] == pytest.approx(operations(case())[0])
    assert slow_units["forward+backward"] == pytest.approx(sum(operations(case())))


def test_the_table_of_cases_is_sane():
    assert len(BY_NAME) == len(CASES) == 37
    for c in CASES:
        for goal in (*c.forward, *c.training):
            assert goal.limit > 0
            assert not goal.case or (goal.against == OURS and goal.case in BY_NAME)
            names = {own.name for own in make_contenders(BY_NAME[goal.case or c.name])}
            assert goal.against in names | {"floor"}
    assert BY_NAME["relu-196"].forward == (Goal(1.6, "floor"), Goal(1.0, "SDPA flash"))
    assert [c.name for c in select(("relu-70000", "causal-4096"))] == ["causal-4096", "relu-70000"]
    assert len(select(("pola-*",))) == 4
    with pytest.raises(OptionError, match="must be one of"):
        select(("causal",))


def fake(monkeypatch, module, **functions):
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        name = ".".join(parts[:i])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, function in functions.items():
        monkeypatch.setattr(sys.modules[module], name, function, raising=False)


def heads_first(*tensors):
    return [t.transpose(1, 2) for t in tensors]


def fla_attention(q, k, v, scale, g=None, normalize=False, **options):
    """What fla's functions are documented to compute, in their layout."""
    q, k, v = heads_first(q, k, v)
    decay = None if g is None else g.transpose(1, 2)
    normalizer = "sum" if normalize else None
    out = linear_attention(q * scale, k, v, causal=True, log_decay=decay, normalizer=normalizer, impl="reference")
    return out.transpose(1, 2), None


def fla_retention(q, k, v, scale):
    g = (1 - 2.0 ** (-5 - torch.arange(q.shape[2], dtype=torch.float32))).log()
    return fla_attention(q, k, v, scale, g.expand(*q.shape[:3]))


def fla_step(q, k, v, scale, initial_state, output_final_state):
    state = LinearState(initial_state, torch.zeros_like(initial_state[..., 0]))
    q, k, v = heads_first(q, k, v)
    out, state = linear_attention_with_state(q * scale, k, v, initial_state=state, causal=True, normalizer=None)
    return out.transpose(1, 2), state.kv


def fla_convolution(x, weight, bias, residual):
    y = F.conv1d(F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0)), weight.unsqueeze(1), bias, groups=x.shape[2])
    return y.transpose(1, 2) + residual, None


def mlstm_exponential(q, k, v, i, f, chunk_size, autocast_kernel_dtype):
    return exponential_attention(q, k, v, log_input=i, log_decay=F.logsigmoid(f), impl="reference")


def mlstm_sigmoid(q, k, v, i, f, normalize, chunk_size, autocast_kernel_dtype):
    k = k * i.sigmoid().unsqueeze(-1) * q.shape[-1] ** -0.5
    return linear_attention(q, k, v, causal=True, log_decay=F.logsigmoid(f), normalizer=None, impl="reference")


XL_CHUNK = "mlstm_kernels.torch.chunkwise.triton_xl_chunk"
RIVALS = {
    "causal-4096": ("fla.ops.linear_attn", {"chunk_linear_attn": fla_attention}),
    "causal-norm-4096": ("fla.ops.linear_attn", {"chunk_linear_attn": fla_attention}),
    "causal-token-4096": ("fla.ops.simple_gla", {"fused_chunk_simple_gla": fla_attention}),
    "causal-channel-4096": ("fla.ops.gla", {"chunk_gla": fla_attention}),
    "causal-head-4096": ("fla.ops.retention", {"chunk_retention": fla_retention}),
    "step-64": ("fla.ops.simple_gla", {"fused_recurrent_simple_gla": fla_step}),
    "convolution-4096": ("fla.modules.convolution", {"causal_conv1d": fla_convolution}),
    "exponential-4096": (XL_CHUNK, {"mlstm_chunkwise__xl_chunk": mlstm_exponential}),
    "sigmoid-wide": (f"{XL_CHUNK}_siging", {"mlstm_siging_chunkwise__xl_chunk": mlstm_sigmoid}),
}


def truth_of(problem, dtype=torch.float32):
    tensors, grad = draw(problem, CPU, dtype, 0)
    own = None if problem.family == "step" else grad
    return tensors, own, Truth(problem, tensors, grad)


@pytest.mark.parametrize("name", RIVALS)
def test_layouts_scales_and_gates_of_rivals_are_converted_rightly(name, monkeypatch):
    module, functions = RIVALS[name]
    fake(monkeypatch, module, **functions)
    small = BY_NAME[name].resized(2, 3, 128, 8)
    (rival,) = [c for c in make_contenders(small) if c.name.startswith(("fla", "mlstm"))]
    tensors, grad, truth = truth_of(small)
    verdict = truth.check(rival.bind(small, tensors), grad)
    assert verdict.ok, verdict


@pytest.mark.parametrize("name", ["exponential-wide", "sigmoid-4096", "lion-16384", "step-64", "mirror-196"])
def test_forms_are_right_in_every_family(name):
    small = BY_NAME[name].resized(1, 2, 70, 8)
    form = bind_form("recurrent" if small.family == "step" else "chunked")
    tensors, grad, truth = truth_of(small, torch.bfloat16)
    assert truth.check(form(small, tensors), grad).ok


def test_parameters_of_a_mechanism_get_gradients_that_are_checked():
    small = BY_NAME["pola-196"].resized(3, 3, 64, 16)
    tensors, grad, truth = truth_of(small)
    bound = bind_form("chunked")(small, tensors)
    assert {"gradient of parameter power", "gradient of parameter scale"} < bound.values(grad).keys()
    assert truth.check(bound, grad).ok
    back = lambda name, t: t * (1.01 if name == "gradient of parameter power" else 1)  # noqa: E731
    assert truth.check(Bound(bound.leaves, bound.run, back=back), grad).worst == "gradient of parameter power"


@pytest.mark.parametrize("T", [48, 2100])
def test_a_contender_is_checked_at_its_last_head(T):
    """By the quadratic form or, where that does not fit, the chunked one; NaN is wrong, and so is a gradient."""
    wide = replace(BY_NAME["causal-token-4096"], B=3, H=4, T=T, K=8, V=8)
    tensors, grad, truth = truth_of(wide)
    right = bind_form("chunked")(wide, tensors)
    factor = torch.ones(4)
    factor[-1] = 1.1
    assert truth.check(right, grad).ok
    assert truth.check(right, grad).against == f"fp64, B3 H4 T{T} D8"
    assert not truth.check(Bound(right.leaves, lambda: right.run() * factor[None, :, None, None]), grad).ok
    assert not truth.check(Bound(right.leaves, lambda: right.run() * float("nan")), None).ok
    k = right.leaves["k"]
    lost = Bound(right.leaves, lambda: right.run() + (k - k.detach()).sum(-1, keepdim=True))
    assert truth.check(lost, None).ok
    assert truth.check(lost, grad).worst == "gradient of k"
    softmax = bind_softmax(wide, tensors)
    assert truth.check(softmax, grad, softmax=True).ok
    assert not truth.check(right, grad, softmax=True).ok


def test_every_row_is_checked_timed_and_weighed(rows_of, tmp_path, monkeypatch):
    for module in ("fla", "fla.ops", "fla.ops.linear_attn"):
        monkeypatch.setitem(sys.modules, module, None)  # also where it is installed
    rows = rows_of(SMALL, tmp_path)
    chunked = [row for row in rows if row["contender"] == "linattn chunked"]
    assert {(r["case"], r["pass_name"]) for r in chunked} == {
        (name, p) for name in ("causal-4096", "relu-196") for p in ("forward", "forward+backward")
    }
    for row in chunked:
        assert row["status"] == "ok"
        assert 0 <= row["error"] <= row["budget"]
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["over_floor"] == row["median_ms"] / row["floor_ms"]
        assert row["extra_over_qkvo"] >= 0
        assert row["timed_by"] == "calls"
        assert row["called_ms"] > 0
    absent = [row for row in rows if row["contender"] == "fla chunk_linear_attn"]
    assert {row["status"] for row in absent} == {"absent"}
    assert "fla not usable: ModuleNotFoundError" in absent[0]["reason"]
    meta = json.loads((tmp_path / "results.json").read_text())["meta"]
    assert meta["copy_bytes_per_second"] > 0
    assert meta["versions"].keys() >= {"triton", "fla-core", "mlstm_kernels", "torch"}
    order = [case["contender"] for case in Kernels(device="cpu", quick=True, only=("causal-4096",)).cases()]
    assert order[0] == OURS
    assert order.index("fla chunk_linear_attn") < order.index("SDPA flash")


def test_a_kernel_that_is_missing_says_why(rows_of, tmp_path, monkeypatch):
    monkeypatch.setattr("linattn.kernels.linear.reason_against", lambda *tensors: "not today")
    rows = rows_of(replace(SMALL, only=("relu-196",), contenders=("linattn triton",)), tmp_path)
    assert {row["status"] for row in rows} == {"absent"}
    assert "not today" in rows[0]["reason"]


def times(factor):
    def bind(own, tensors):
        right = bind_form("chunked")(own, tensors)
        return Bound(right.leaves, lambda: right.run() * factor)

    return bind


def test_wrong_rivals_are_told_and_wrong_rows_of_ours_fail(rows_of, tmp_path, monkeypatch, capsys):
    right, wrong = Contender(OURS, times(1)), Contender("a rival", times(1.01))
    monkeypatch.setattr(kernels, "make_contenders", lambda own: [right, wrong])
    config = replace(SMALL, contenders=(), only=("causal-4096",))
    rows = rows_of(config, tmp_path / "rival")  # not ours
    assert {(row["contender"], row["status"]) for row in rows} == {(OURS, "ok"), ("a rival", "WRONG")}
    row = next(row for row in rows if row["status"] == "WRONG")
    assert row["median_ms"] > 0
    assert "is off by" in row["reason"]
    assert (tmp_path / "rival" / "kernels.png").exists()
    monkeypatch.setattr(kernels, "make_contenders", lambda own: [Contender(OURS, times(1.01))])
    rows_of(config, tmp_path / "ours", code=1)
    assert f"causal-4096, {OURS}, forward: WRONG" in capsys.readouterr().err


def row(name, contender, pass_name="forward", ms=1.0, status="ok", **more):
    return {"case": name, "contender": contender, "pass_name": pass_name, "median_ms": ms, "floor_ms": 0.5,
            "over_floor": ms / 0.5, "status": status, "timed_by": "CUDA graph", "called_ms": 3 * ms} | more  # fmt: skip


def test_goals_are_judged_by_rows_that_count():
    training, norm = "forward+backward", "fla chunk_linear_attn, normalised"
    rows = [
        row("causal-4096", OURS, ms=0.6, extra_over_qkvo=0.2), row("causal-4096", OURS, training, extra_over_qkvo=0.2),
        row("causal-4096", "fla chunk_linear_attn", training, ms=4.0),
        row("causal-channel-4096", OURS),
        row("causal-channel-4096", "fla chunk_gla", ms=4.0, timed_by="calls", called_ms=4.0),
        row("causal-norm-4096", OURS, training), row("causal-norm-4096", norm, training, ms=8.0, timed_by="long calls"),
        row("relu-196", OURS, status="WRONG", reason="it is"), row("pola-196", OURS, ms=1.5),
        {"case": "pola-196", "contender": OURS, "pass_name": "cold start", "status": "ok", "first_seconds": 10.5},
    ]  # fmt: skip
    found = {(o["case"], o["what"], o["goal"]): o for o in outcomes(rows)}
    forward = found["causal-4096", "forward", "<= 1.25x floor"]
    assert (forward["value"], forward["reached"]) == (pytest.approx(1.2), True)
    assert found["causal-4096", training, "<= 0.5x fla chunk_linear_attn"]["value"] == 0.25
    assert found["causal-4096", "memory, forward", "<= 15% of q, k, v, o"]["reached"] is False
    assert found["causal-4096", f"memory, {training}", "<= 30% of q, k, v, o"]["reached"] is True
    uneven = found["causal-channel-4096", "forward", "<= 0.7x fla chunk_gla"]
    assert (uneven["value"], uneven["reached"]) == (0.75, False)  # alike: both as Python calls them
    long = found["causal-norm-4096", training, f"<= 0.35x {norm}"]
    assert (long["value"], long["reason"]) == (1 / 8, "")
    assert found["pola-196", "cold start", "<= 10 s"]["reached"] is False
    wrong = found["relu-196", "forward", "<= 1.6x floor"]
    assert (wrong["value"], wrong["reached"], wrong["reason"]) == (None, None, "WRONG: it is")
    mapped = found["pola-196", "forward", "<= 2x linattn triton in relu-196"]
    assert mapped["value"] == 1.5  # against the time of a wrong row, which is said
    assert "WRONG" in mapped["reason"]
