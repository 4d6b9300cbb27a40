"""Sentences and CSV: no ranking inside the spread."""

import csv
from statistics import mean

import pytest

from lab.pages.fixtures import MECHANISMS, make_results, make_unfinished
from linattn.lab.pages import ranking_sentence, write_csv


def results_of(**top1: list[float]) -> dict:
    rows = [{"mechanism": name, "status": "done", "top1": v} for name, values in top1.items() for v in values]
    return {"meta": {"finished": True}, "mechanisms": [], "rows": rows}


def test_overlapping_ranges_are_no_difference():
    said = ranking_sentence(results_of(mirror=[97.0, 97.4], nala=[96.8, 97.1], relu=[95.0, 96.9], softmax=[97.3, 97.9]))
    assert "mirror has the highest mean top-1: 97.20 % (97.00 to 97.40 over 2 seeds)" in said
    assert "No difference beyond the spread to nala" in said
    assert "Every run of relu is below every run of mirror." in said
    assert "softmax, has 97.60 % (97.30 to 97.90 over 2 seeds): no difference beyond the spread to mirror." in said


@pytest.mark.parametrize(("softmax", "word"), [([98.0, 98.5], "above"), ([90.0, 91.0], "below")])
def test_softmax_is_told_apart_only_by_whole_ranges(softmax, word):
    said = ranking_sentence(results_of(softmax=softmax, mirror=[97.0, 97.4], relu=[97.0, 97.1]))
    assert f"every run is {word} those of mirror" in said
    assert "Of the linear mechanisms mirror" in said


def test_ranges_that_touch_overlap():
    said = ranking_sentence(results_of(a=[97.0, 98.0], b=[96.0, 97.0]))
    assert "No difference beyond the spread to b" in said
    assert "below" not in said


def test_all_overlap():
    said = ranking_sentence(results_of(a=[97.0, 98.0], b=[96.0, 97.5], c=[97.1, 97.2]))
    assert "No difference beyond the spread: the ranges of b and c all overlap its own." in said


def test_one_run_claims_nothing():
    said = ranking_sentence(results_of(a=[97.0], b=[90.0], softmax=[99.0]))
    assert "no ranking is claimed" in said
    assert "below" not in said
    assert "above" not in said
    said = ranking_sentence(results_of(a=[97.0, 96.0], b=[90.0]))
    assert "b has one run, too few to place." in said
    said = ranking_sentence(results_of(a=[97.0], softmax=[99.0]))
    assert "The top-1 of a is 97.00 % in one run" in said


def test_the_written_numbers_come_before_those_of_the_rows():
    results = results_of(a=[97.0, 98.0], b=[96.0, 96.5])
    results["mechanisms"] = [{"mechanism": "a", "top1_mean": 95.0, "top1_min": 94.0, "top1_max": 96.2, "runs": 3}]
    said = ranking_sentence(results)
    assert said.startswith("Of the linear mechanisms b has the highest mean top-1: 96.25 %")
    assert "No difference beyond the spread to a" in said


def test_unfinished_counts_the_runs_that_have_no_row_yet():
    results = make_results()
    results["meta"]["finished"] = False
    results["rows"] = results["rows"][:4]
    assert ranking_sentence(results).startswith("Unfinished: 4 of 21 runs are done.")


def test_csv_has_a_line_a_mechanism_and_a_line_a_run(tmp_path):
    results = make_results()
    results["rows"][4]["reason"] = 'a, "b"\nc'
    paths = write_csv(results, tmp_path / "results.csv")
    assert [path.name for path in paths] == ["results.csv", "runs.csv"] == sorted(p.name for p in tmp_path.iterdir())
    mechanisms, runs = (list(csv.DictReader(path.open(newline=""))) for path in paths)
    assert [line["mechanism"] for line in mechanisms] == list(MECHANISMS)
    for line, entry in zip(mechanisms, results["mechanisms"], strict=True):
        for field, value in line.items():
            given = entry[field]
            assert value == ("" if given is None else str(given)), field
    assert [float(line["top1"]) for line in runs] == [row["top1"] for row in results["rows"]]
    assert runs[4]["reason"] == 'a, "b"\nc'


def test_csv_of_unfinished_results_leaves_empty_what_is_not_known(tmp_path):
    paths = write_csv(make_unfinished(), tmp_path / "results.csv")
    mechanisms, runs = (list(csv.DictReader(path.open(newline=""))) for path in paths)
    lines = {line["mechanism"]: line for line in mechanisms}
    assert (lines["relu"]["runs"], float(lines["relu"]["top1_mean"])) == ("2", mean((91.02, 91.34)))
    assert (lines["pola"]["runs"], lines["pola"]["top1_mean"], lines["pola"]["parameters"]) == ("0", "", "")
    assert [line["status"] for line in runs].count("waiting") == 15


@pytest.mark.parametrize("name", ["gated*3/softmax", "zeros_softmax"])
def test_what_has_quadratic_layers_is_not_called_linear(name):
    results = results_of(**{name: [97.0, 98.0], "elu": [90.0, 91.0], "softmax": [99.0, 99.5]})
    said = ranking_sentence(results)
    assert said.startswith(f"Of the mechanisms other than softmax {name} has the highest mean top-1")
    results["rows"] = [row | {"mechanism": f"{row['mechanism']} 64"} for row in results["rows"]]
    results["mechanisms"] = [{"mechanism": f"{pattern} 64", "pattern": pattern} for pattern in (name, "elu", "softmax")]
    assert ranking_sentence(results).startswith(f"Of the mechanisms other than softmax {name} 64 has")
    assert ranking_sentence(
        results_of(softmax=[99.0], **{name: []}) | {"mechanisms": [{"mechanism": name}]}
    ).startswith("No mechanism other than softmax has a result yet.")
