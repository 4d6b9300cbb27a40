"""The laboratory end to end: small models reach their formulas, the page shows them, wrong options are named."""

import pytest
import torch

from linattn.lab.cases import Work
from linattn.lab.experiment import load_results
from linattn.lab.screen import Screen
from linattn.lab.theory.icl import Icl, gains
from linattn.support.options import OptionError

SMALL = {"quick": True, "device": "cpu", "d": 3, "lengths": (4, 8), "steps": 350, "tests": 1 << 16, "jobs": 1}


def test_trained_models_reach_their_formulas_and_h3_wins_where_tasks_drift(tmp_path):
    assert Icl(**SMALL, families=("drift",), models=("linear", "h3"), output=tmp_path).run(Screen(quiet=True)) == 0
    rows = load_results(tmp_path / "results.json")["rows"]
    assert len(rows) == 2 * 3 * 2
    for row in rows:
        assert abs(row["trained"] - row["theory"]) < 0.03 * row["theory"] + 3 * row["standard_error"]
        assert row["standard_error"] < 0.015 * row["theory"]
    won = {gain["data"]: gain for gain in gains(rows)}
    drifts, stays = won["drift, memory 0.8, n = 8"], won["drift, memory 1, n = 8"]
    assert drifts["measured"] > 0.5 * drifts["by the formulas"] > 1  # percent of the risk
    assert abs(stays["measured"]) < 2
    assert stays["by the formulas"] == 0
    page = (tmp_path / "report.html").read_text()
    for text in ("memory 0.95: risk / d", "H3 gains up to", "memory 0.8", "within 5 %"):
        assert text in page
    assert (tmp_path / "icl-drift.png").stat().st_size > 10_000


def test_wrong_options_are_named():
    wrong = {"families": "nothing", "models": "nothing", "lengths": "3,3", "steps": "0", "lr": "0"}
    for name, value in wrong.items():
        with pytest.raises(OptionError) as raised:
            Icl.parse({"quick": "true", name: value})
        assert raised.value.option == name
    with pytest.raises(OptionError, match="linear alone"):
        Icl(families=("low-rank",), models=("h3",))


UNITS = [("low-rank-update", "linear"), ("retrieval", "canon"), ("drift", "gated")]


@pytest.mark.parametrize(("family", "model"), UNITS)
def test_other_units_give_a_row_for_every_model(family, model, tmp_path):
    lab = Icl(families=(family,), models=(model,), d=3, lengths=(2, 4), seeds=2, steps=20, batch=16, tests=512)
    (case,) = lab.cases()
    rows = [{**case, **row} for row in lab.measure(case, Work(tmp_path))["rows"]]
    curves = {"low-rank-update": 4, "retrieval": 4, "drift": 3}[family]
    assert [(row["n"], row["seed"]) for row in rows] == [(2, 0), (2, 1), (4, 0), (4, 1)] * curves
    assert all(row["trained"] > 0 for row in rows)
    assert len(lab.sentences(rows)) == 1


@pytest.mark.gpu
def test_models_in_twenty_dimensions_are_within_two_per_cent_of_the_formula(tmp_path):
    for family, model in (("independent", "linear"), ("alignment", "linear"), ("drift", "h3")):
        lab = Icl(families=(family,), models=(model,), lengths=(5, 60), seeds=1, device="cuda")
        (case,) = lab.cases()
        assert not lab.wrong([{**case, **row} for row in lab.measure(case, Work(tmp_path))["rows"]])
    torch.cuda.synchronize()
