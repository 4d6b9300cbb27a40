"""What all comparisons have in common: phases of cases, each kept, and a fair choice of learning rates."""

import json
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest

from linattn.lab.compare.comparison import Comparison
from linattn.lab.compare.findings import Metric
from linattn.lab.screen import Screen
from linattn.support.options import OptionError

BEST = {"softmax": 0.01, "relu": 0.1}  # learning rates


@dataclass(frozen=True, kw_only=True)
class Toy(Comparison):
    """Scores are known; each call leaves a line in ``calls``."""

    calls: Path | None = None
    fails: str = ""
    stops: str = ""

    of_cases = (*Comparison.of_cases, "calls", "fails", "stops", "output", "jobs", "where")

    of_trained = {"attention": {}}  # noqa: RUF012

    def metric(self) -> Metric:
        return Metric("error", "", 1, higher=False)

    def usual_lr(self, name):
        return 0.5

    def run_case(self, case, work):
        self._log("run", case["mechanism"], case["seed"], case["lr"], case["validation"])
        if case["mechanism"] == self.fails:
            raise RuntimeError("the loss is not finite")
        if case["mechanism"] == self.stops:
            raise KeyboardInterrupt
        far = abs(case["lr"] - BEST.get(case["mechanism"], 0.01))
        return {"score": far + 0.001 * case["seed"], "seconds": 1.0, "records": [{"round": 1, "score": far}]}

    def cost_case(self, case, work):
        names = [part["mechanism"] for part in case["mechanisms"]]
        self._log("cost", *names)
        return {"rows": [{"mechanism": name, "parameters": 7} for name in names]}

    def attention_case(self, case, work):
        self._log("attention", case["mechanism"])
        image = {"label": "a", "pixels": [[0]], "token": [0, 0], "map": [[1.0]]}
        return {"entropy": 1.0, "layers": [], "examples": {"layer": "last", "images": [image]}}

    def write_page(self, meta, rows):
        """None: pages have tests of their own."""

    def _log(self, *words):
        if self.calls:
            with self.calls.open("a") as file:
                file.write(" ".join(map(str, words)) + "\n")


def run(folder, **options):
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    given = {"mechanisms": ("softmax", "relu"), "seeds": 2, "device": "cpu", "jobs": 1} | options
    code = Toy(output=folder, calls=calls, **given).run(Screen(quiet=True))
    return code, json.loads((folder / "results.json").read_text()), calls.read_text().split("\n")[:-1]


def test_each_mechanism_takes_its_best_rate_of_the_same_sweep(tmp_path):
    code, results, calls = run(tmp_path, lr=(0.1, 0.01))
    assert code == 0
    chosen = {row["mechanism"]: row["lr"] for row in results["rows"] if row["kind"] == "run"}
    assert chosen == BEST
    swept = [row for row in results["rows"] if row["kind"] == "sweep"]
    assert len(swept) == 4
    assert all(row["validation"] for row in swept)
    assert calls[-3:] == ["cost softmax relu", "attention softmax", "attention relu"]
    assert [row["parameters"] for row in results["rows"] if row["kind"] == "cost"] == [7, 7]
    (image,) = json.loads((tmp_path / "examples.json").read_text())["images"]
    assert image["maps"] == {"softmax": [[1.0]], "relu": [[1.0]]}


def test_mechanisms_and_seeds_are_added_later_and_only_they_are_trained(tmp_path):
    _, results, calls = run(tmp_path)
    assert {row["lr"] for row in results["rows"] if row["kind"] == "run"} == {0.5}, "by recipe"
    assert not any("True" in call for call in calls), "nothing is chosen"
    _, results, calls = run(tmp_path, mechanisms=("softmax", "relu", "elu"), seeds=3)
    trained = [call for call in calls if call.startswith("run")]
    assert len(trained) == 5
    assert not [call for call in trained if " elu" not in call and " 2 " not in call]
    assert "cost softmax relu elu" in calls
    assert "attention elu" in calls
    assert "attention relu" not in calls
    assert len([row for row in results["rows"] if row["kind"] == "run"]) == 9


def test_other_options_are_other_cases(tmp_path):
    run(tmp_path, mechanisms=("softmax", "pola"))
    _, results, calls = run(tmp_path, mechanisms=("softmax", "pola"), option={"pola.alpha": 4.0})
    assert [call for call in calls if call.startswith("run")] == ["run pola 0 0.5 False", "run pola 1 0.5 False"]
    assert [row.get("options") for row in results["rows"] if row["kind"] == "run"] == [None, {"alpha": 4.0}] * 2


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failure_concerns_its_run_alone(tmp_path, jobs):
    code, results, calls = run(tmp_path, fails="relu", jobs=jobs)
    assert code == 1
    runs = {(row["mechanism"], row["seed"]): row for row in results["rows"] if row["kind"] == "run"}
    assert "not finite" in runs["relu", 1]["error"]
    assert runs["softmax", 1]["score"] == pytest.approx(0.491)
    assert "cost softmax" in calls
    assert "attention relu" not in calls


def test_an_interrupted_comparison_goes_on(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stops="relu")
    _, results, calls = run(tmp_path)
    assert "run softmax 0 0.5 False" not in calls
    assert len([row for row in results["rows"] if row["kind"] == "run"]) == 4


def test_another_process_makes_a_config_once_for_all_its_cases():
    one, other = (pickle.loads(pickle.dumps(Toy(lr=(0.1, 0.01), calls=Path("calls")))) for _ in range(2))
    assert one is other
    assert one == Toy(lr=(0.1, 0.01), calls=Path("calls"))


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"mechanisms": ()}, "mechanisms"),
        ({"mechanisms": ("nothing",)}, "mechanisms"),
        ({"seeds": 0}, "seeds"),
        ({"lr": (0.1, 0.0)}, "lr"),
        ({"margin": 0.0}, "margin"),
        ({"option": {"pola.alpha": 3}, "mechanisms": ("relu",)}, "option"),
    ],
)
def test_wrong_options_are_refused(options, option):
    with pytest.raises(OptionError) as error:
        Toy(**options)
    assert error.value.option == option
