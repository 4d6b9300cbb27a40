"""`linattn bench`: contenders are checked against fp64 before they count, and what costs too much is left out."""

from dataclasses import replace

import pytest
import torch

from lab.bench.running import rows_of, statuses
from linattn.lab.bench import attention
from linattn.lab.bench import oracle as oracle_module
from linattn.lab.bench.attention import Attention, growth
from linattn.lab.bench.contenders import gradient_of_output, make_contenders, make_inputs, token_loop
from linattn.lab.bench.oracle import Oracle

DECAYS = ("none", "head", "token", "channel")
FORMS = ("reference", "recurrent", "chunked")
SMALL = Attention(lengths=(32, 64), impl=("recurrent", "reference"), heads=2, head_dim=8, quick=True, max_gib=1,
                  device="cpu")  # fmt: skip


def setup(length=96, training=True, **options):
    config = Attention(**{"heads": 2, "head_dim": 8, "impl": FORMS, "device": "cpu", **options})
    inputs = make_inputs(config, length)
    oracle = Oracle(inputs, gradient_of_output(inputs, config.seed) if training else None)
    return {c.name: c for c in make_contenders(config)}, oracle


@pytest.fixture
def nothing_long_fits(monkeypatch):
    """Let the quadratic form serve the 64 tokens of the probe, and no more."""
    monkeypatch.setattr(oracle_module, "MOST_BYTES", 1)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("causal", [True, False])
def test_all_forms_are_right_against_the_quadratic_form(causal, decay):
    contenders, oracle = setup(causal=causal, decay=decay)
    for contender in contenders.values():
        verdict = oracle.check(contender)
        assert verdict.ok, verdict
        assert verdict.against == "fp64"


@pytest.mark.parametrize("decay", ["none", "token"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.usefixtures("nothing_long_fits")
def test_long_sequences_are_checked_in_linear_time(causal, decay):
    contenders, oracle = setup(length=150, causal=causal, decay=decay)
    for name in ("sdpa", "recurrent", "chunked"):
        verdict = oracle.check(contenders[name])
        assert (verdict.ok, verdict.against) == (True, "fp64 in linear time"), verdict


@pytest.mark.parametrize("where", [0, 75, 149])
@pytest.mark.usefixtures("nothing_long_fits")
def test_one_wrong_token_of_a_long_sequence_is_found(where):
    contenders, oracle = setup(length=150, training=False)
    good = contenders["chunked"]

    def off_at_one_token(inputs):
        output = good.run(inputs).clone()
        output[0, 0, where, 0] += 1e-4
        return output

    verdict = oracle.check(replace(good, run=off_at_one_token))
    assert (verdict.ok, verdict.worst) == (False, "output")
    largest = good.run(oracle.inputs.to(torch.float64)).abs().max().item()
    assert verdict.error == pytest.approx(1e-4 / largest, rel=0.05)


def test_a_wrong_gradient_is_found_though_values_are_right():
    contenders, oracle = setup()
    good = contenders["chunked"]

    def forgets_a_gradient(inputs):
        half = inputs.phi_k.detach() * 0.5 + inputs.phi_k * 0.5
        return good.run(replace(inputs, phi_k=half))

    wrong = replace(good, run=forgets_a_gradient)
    assert Oracle(oracle.inputs, None).check(wrong).ok
    verdict = oracle.check(wrong)
    assert (verdict.ok, verdict.worst) == (False, "gradient of phi_k")
    assert not oracle.check(replace(good, run=lambda inputs: good.run(inputs) * float("nan"))).ok


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("causal", [True, False])
def test_the_plain_token_loop_is_linear_attention(causal, decay):
    # It sets a budget, so an error in it would hide errors elsewhere.
    contenders, oracle = setup(causal=causal, decay=decay, dtype="float64")
    expected = contenders["reference"].run(oracle.inputs)
    torch.testing.assert_close(token_loop(causal, oracle.inputs), expected, rtol=1e-12, atol=1e-12)


def test_mechanisms_are_checked_with_their_own_parameters_and_input():
    contenders, oracle = setup(impl=(), mechanisms=("elu", "gated"))
    for name in ("elu", "gated"):
        assert oracle.check(contenders[name]).ok


def with_run_of(name, change):
    """Contenders of which one runs otherwise."""

    def make(config):
        return [replace(c, run=change(c.run)) if c.name == name else c for c in make_contenders(config)]

    return make


def test_every_contender_gets_a_checked_row_per_length_and_pass(tmp_path):
    rows = rows_of(SMALL, tmp_path)
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        assert row["status"] == "ok"
        assert 0 <= row["error"] <= row["budget"]
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["repeats"] >= 3
        assert row["peak_over_qkvo"] == row["peak_bytes"] / (4 * 2 * row["length"] * 8 * 4)
        assert row["peak_over_qkvo"] >= 1
        assert row["checked_against"] == "fp64"
        same = (row["length"], row["pass_name"])
        sdpa = next(r for r in rows if (r["length"], r["pass_name"]) == same and r["contender"] == "sdpa")
        assert row["speedup_over_sdpa"] == sdpa["median_ms"] / row["median_ms"]


def test_a_wrong_form_and_one_that_raises_are_told_and_cost_no_other(tmp_path, monkeypatch):
    def broken(run):
        def raises(inputs):
            if inputs.length == 64:
                raise RuntimeError("no such\nkernel")
            return run(inputs) * 1.001

        return raises

    monkeypatch.setattr(attention, "make_contenders", with_run_of("recurrent", broken))
    rows = rows_of(SMALL, tmp_path, code=1)
    assert statuses(rows, "contender") == {
        ("sdpa", "ok"), ("reference", "ok"), ("recurrent", "WRONG"), ("recurrent", "failed")
    }  # fmt: skip
    reasons = {row["reason"] for row in rows if row["status"] == "failed"}
    assert reasons == {"RuntimeError: no such kernel"}


def test_what_costs_too_much_is_left_out_with_the_reason(tmp_path, monkeypatch):
    rows = rows_of(replace(SMALL, lengths=(1024,), max_gib=0.005, backward=False), tmp_path / "memory")
    left = {row["contender"]: row["reason"] for row in rows if row["status"] == "left out"}
    assert "reference" in left
    assert left["reference"].endswith("GiB, limit 0.005 GiB")
    monkeypatch.setattr(attention, "seconds_of", lambda call, device: 1.0)
    rows = rows_of(replace(SMALL, max_seconds=0.5), tmp_path / "time")
    # Softmax, to which all are compared, may take longer.
    assert statuses(rows, "contender") == {("sdpa", "ok"), ("recurrent", "left out"), ("reference", "left out")}


def test_growth_is_told_of_steady_rows_alone():
    rows = [{"contender": "chunked", "pass_name": "forward", "length": T, "status": "ok", "median_ms": T / 100,
             "p20_ms": T / 100, "p80_ms": T / 100} for T in (1024, 2048, 4096)]  # fmt: skip
    assert growth(rows) == [{"contender": "chunked", "pass_name": "forward", "exponent": pytest.approx(1)}]
    assert growth([*rows[:2], rows[2] | {"p80_ms": 900.0}]) == []
