"""`linattn bench`: contenders are checked against fp64 before they count, and what costs too much is left out."""

from dataclasses import replace

import pytest
import torch

from linattn.lab.bench import attention, memory
from linattn.lab.bench.attention import Attention, growth
from linattn.lab.bench.problems import Bound, bind_form

CPU = torch.device("cpu")
FORMS = ("reference", "recurrent", "chunked")
SMALL = Attention(
    lengths=(32, 64), impl=("recurrent", "reference"), heads=2, head_dim=8, quick=True, max_gib=1, device="cpu"
)


def statuses(rows):
    return {(row["contender"], row["status"]) for row in rows}


@pytest.mark.parametrize("decay", ["none", "head", "token", "channel"])
@pytest.mark.parametrize("causal", [True, False])
def test_all_forms_and_mechanisms_are_right(rows_of, tmp_path, causal, decay):
    mechanisms = ("elu", "gated") if decay == "none" else ()
    rows = rows_of(replace(SMALL, impl=FORMS, mechanisms=mechanisms, causal=causal, decay=decay), tmp_path)
    assert statuses(rows) == {(name, "ok") for name in ("sdpa", *FORMS, *mechanisms)}


def test_every_contender_gets_a_checked_row_per_length_and_pass(rows_of, tmp_path):
    rows = rows_of(SMALL, tmp_path)
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        assert row["status"] == "ok"
        assert 0 <= row["error"] <= row["budget"] < 1e-4
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert row["repeats"] >= 3
        assert row["peak_bytes"] >= 4 * 2 * row["length"] * 8 * 4
        assert row["checked_against"] == f"fp64, B1 H2 T{row['length']} D8"
        same = (row["length"], row["pass_name"])
        sdpa = next(r for r in rows if (r["length"], r["pass_name"]) == same and r["contender"] == "sdpa")
        assert row["over_sdpa"] == row["median_ms"] / sdpa["median_ms"]


def test_a_wrong_form_and_one_that_raises_are_told_and_cost_no_other(rows_of, tmp_path, monkeypatch):
    def broken(impl):
        right = bind_form(impl)

        def bind(problem, tensors):
            if impl != "recurrent":
                return right(problem, tensors)
            if problem.T == 64:
                raise RuntimeError("no such\nkernel")
            bound = right(problem, tensors)
            return Bound(bound.leaves, lambda: bound.run() * 1.001)

        return bind

    monkeypatch.setattr(attention, "bind_form", broken)
    rows = rows_of(SMALL, tmp_path, code=1)
    assert statuses(rows) == {("sdpa", "ok"), ("reference", "ok"), ("recurrent", "WRONG"), ("recurrent", "failed")}
    reasons = {row["reason"] for row in rows if row["status"] == "failed"}
    assert reasons == {"RuntimeError: RuntimeError: no such kernel"}


def test_what_costs_too_much_is_left_out_with_the_reason(rows_of, tmp_path, monkeypatch):
    rows = rows_of(replace(SMALL, lengths=(1024,), max_gib=0.005), tmp_path / "memory")
    left = {row["contender"]: row["reason"] for row in rows if row["status"] == "left out"}
    assert "reference" in left
    assert left["reference"].endswith("GiB at 1024 tokens, limit 0.005 GiB")
    monkeypatch.setattr(memory, "seconds_of", lambda call, device: 0.5)
    rows = rows_of(replace(SMALL, lengths=(128,), max_seconds=1.5), tmp_path / "time")
    # Softmax, to which all are compared, may take longer.
    assert statuses(rows) == {("sdpa", "ok"), ("recurrent", "left out"), ("reference", "left out")}


def test_growth_is_told_of_steady_rows_alone():
    rows = [{"contender": "chunked", "pass_name": "forward", "length": T, "status": "ok", "median_ms": T / 100,
             "p20_ms": T / 100, "p80_ms": T / 100} for T in (1024, 2048, 4096)]  # fmt: skip
    assert growth(rows) == [{"contender": "chunked", "pass_name": "forward", "exponent": pytest.approx(1)}]
    assert growth([*rows[:2], rows[2] | {"p80_ms": 900.0}]) == []
