"""Comparisons: contenders in one host with one budget, several seeds, and one sweep of settings for all of them.

Each phase has its cases, and each case is kept in the folder of the comparison:

    sweep      contender x point x seed     judged by validation data; only where there is more than one point
    run        contender x seed             at the best point of the contender, judged by test data
    cost       contenders timed in turns    speed, memory, parameters
    attention  contender                    the trained model of the first seed

A point is what is swept: learning rates, and whatever else a kind of comparison tries. More contenders and more seeds
are more cases, so that they can be added to the same folder later.
"""

import json
import os
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from linattn.lab.cases import Outcome, Work, run_cases
from linattn.lab.experiment import FAILED, RIGHT, Experiment, save_csv, save_results
from linattn.lab.kept import Case, case_path, find
from linattn.lab.screen import Screen
from linattn.lab.train.config import check_owners, options_of
from linattn.mechanisms.registry import list_mechanisms
from linattn.support.config import option
from linattn.support.files import write_json
from linattn.support.machine import cores, describe_run
from linattn.support.options import OptionError, check_folder

if TYPE_CHECKING:
    from linattn.lab.page import Section

Point = dict[str, Any]
Phase = tuple[str, list[dict[str, Any]]]
ALONE = ("cost", "attention")  # phases whose cases are not measured beside others
OF_CASES = ("mechanisms", "seeds", "lr", "option", "margin", "device")


@dataclass(frozen=True)
class Metric:
    """The score of a run, and the words for what models are trained on.

    Example:
        >>> Metric().text(97.3), Metric("bits per byte", "", 3, higher=False).text(1.25)
        ('97.30 %', '1.250')
    """

    name: str = "top-1"
    unit: str = "%"
    decimals: int = 2
    higher: bool = True
    counted: str = "image"
    """What speeds and costs count: ``image`` or ``token``."""
    round: str = "epoch"
    """What training counts."""

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> "Metric":
        return cls(**(meta.get("metric") or {}))

    def number(self, value: float) -> str:
        return f"{value:.{self.decimals}f}"

    def text(self, value: float) -> str:
        return f"{self.number(value)} {self.unit}".strip()

    @property
    def title(self) -> str:
        """The metric at the head of a column or a chart."""
        name = self.name[0].upper() + self.name[1:]
        return f"{name}, {self.unit}" if self.unit else name

    def best(self, values: Mapping[Any, float]) -> Any:
        """The key of the best value; among equals the first."""
        return (max if self.higher else min)(values, key=lambda key: values[key])


@dataclass(frozen=True, kw_only=True)
class Comparison(Experiment):
    """The base of comparisons; one defines :meth:`run_case`, :meth:`metric`, :meth:`describe`, and what it measures.

    Cases are measured by a method of the config, which is sent to other processes with them: a case has all that its
    result depends on, the config also the options without effect on results, such as the device.
    """

    mechanisms: tuple[str, ...] = option(
        ("softmax", "relu", "pola", "nala", "mirror"), "Names from `linattn mechanisms`, with commas.",
        choices=list_mechanisms, group="Comparison",
    )  # fmt: skip
    seeds: int = option(2, "Runs of each mechanism; below 5 no difference is claimed.", least=1, group="Comparison")
    lr: tuple[float, ...] = option(
        (), "Learning rate; of several, each mechanism takes its best on held-out training data.", above=0,
        group="Comparison", default_text="by recipe",
    )  # fmt: skip
    margin: float | None = option(
        None, "Difference of scores that counts as none, to show that two are equal.", above=0, affects=False,
        rare=True, group="Comparison",
    )  # fmt: skip
    option: dict[str, Any] = option(
        {}, "Option of a mechanism: key=value for all, mechanism.key=value for one; may be given again.",
        group="Comparison",
    )  # fmt: skip

    of_cases: ClassVar[tuple[str, ...]] = OF_CASES
    """Options that a case has in its own fields, or that say which cases there are: they are not common to all."""
    sweep_seeds: ClassVar[int] = 1
    sweep_is_final: ClassVar[bool] = False
    """Whether runs that choose a point train on all training data: the best is then the run of the first seed, too.
    Their result has ``validation``, too, which is then a score."""

    # What a kind of comparison defines.

    def metric(self) -> Metric:
        return Metric()

    def run_case(self, case: Case, work: Work) -> Mapping[str, Any]:
        """Train ``case["mechanism"]`` with ``case["seed"]`` at the point in ``case``, on held-out data if
        ``case["validation"]``. The result has ``score``, ``seconds`` of training and ``records``: the evaluations in
        order, each with the number of rounds trained, ``train_loss`` and ``score``."""
        raise NotImplementedError

    def cost_case(self, case: Case, work: Work) -> Mapping[str, Any]:
        """Costs by name, of ``case["mechanisms"]``."""
        raise NotImplementedError

    def attention_case(self, case: Case, work: Work) -> Mapping[str, Any]:
        """What attention does in the model that the run ``case["of"]`` trained."""
        raise NotImplementedError

    def check_hosts(self) -> None:
        """Raise an OptionError if a contender does not fit, before anything is trained."""

    def prepare(self, screen: Screen) -> None:
        """Make data that all processes share, before they start."""

    def describe(self) -> dict[str, Any]:
        """Of the ``meta`` of results: ``data`` and ``host``, and ``about``: all of it in a sentence."""
        return {}

    def has(self, kind: str) -> bool:
        """Whether there is a phase of this kind."""
        return kind == "run" or getattr(type(self), f"{kind}_case") is not getattr(Comparison, f"{kind}_case")

    def contenders(self) -> tuple[str, ...]:
        return self.mechanisms

    def owners(self) -> Collection[str]:
        """The mechanisms that may have options of their own."""
        return self.contenders()

    def usual_lr(self, name: str) -> float:
        """The learning rate of a contender if none is given."""
        raise NotImplementedError

    def points(self, name: str) -> list[Point]:
        """The points that a contender's sweep tries, learning rates from low to high."""
        return [{"lr": lr} for lr in sorted(set(self.lr)) or [self.usual_lr(name)]]

    def options(self, name: str) -> dict[str, Any]:
        """The options of a contender."""
        return options_of(name, self.option)

    # Cases.

    def check(self) -> None:
        super().check()
        names = self.contenders()
        if not names:
            raise OptionError("mechanisms", f"name at least one of {', '.join(list_mechanisms())}")
        if len(set(names)) < len(names):
            raise OptionError("mechanisms", f"each may be named once, got {', '.join(names)}")
        check_owners(self.option, self.owners())

    def common(self) -> dict[str, Any]:
        """What the results of all cases depend on; of the device only its kind."""
        values = {name: value for name, value in self.values(affecting=True).items() if name not in self.of_cases}
        return values | {"device": self.place().type}

    def case(self, kind: str, name: str, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "mechanism": name, "options": self.options(name), **more, "config": self.common()}

    def sweep_cases(self) -> list[dict[str, Any]]:
        """The runs that choose a point for each contender; none for contenders with one point."""
        return [
            self.case("run", name, seed=seed, **point, validation=not self.sweep_is_final)
            for name in self.contenders()
            for point in self.points(name)
            for seed in range(self.sweep_seeds)
            if len(self.points(name)) > 1
        ]

    def final_cases(self, chosen: Mapping[str, Point]) -> list[dict[str, Any]]:
        """The final runs, seed by seed; with compiled code mechanism by mechanism, so that it serves all seeds."""
        cases = [
            self.case("run", name, seed=seed, **chosen[name], validation=False)
            for seed in range(self.seeds)
            for name in self.contenders()
        ]
        names = list(self.contenders())
        return sorted(cases, key=lambda case: names.index(case["mechanism"])) if self.compiles else cases

    def choose(self, swept: Sequence[Outcome]) -> dict[str, Point]:
        """For each contender the point with the best mean validation score; among equals the first."""
        chosen = {name: self.points(name)[0] for name in self.contenders()}
        key = "validation" if self.sweep_is_final else "score"
        for name in chosen:
            scores: dict[int, float] = {}
            for number, point in enumerate(self.points(name)):
                runs = [o for o in swept if o.case["mechanism"] == name and point.items() <= dict(o.case).items()]
                found = [o.result[key] for o in runs if o.result is not None]
                if found and len(found) == len(runs):
                    scores[number] = fmean(found)
            if scores:
                chosen[name] = self.points(name)[self.metric().best(scores)]
        return chosen

    def phases(self) -> Generator[Phase, list[Outcome], None]:
        """The phases in order. A generator that is sent the outcomes of a phase before it yields the next one."""
        swept = yield "sweep", self.sweep_cases()
        runs = yield "run", self.final_cases(self.choose(swept))
        trained = {o.case["mechanism"]: o.case for o in runs if not o.error and o.case["seed"] == 0}
        # Only trained ones: what failed in training would fail again.
        if self.has("cost"):
            yield (
                "cost",
                [
                    {"kind": "cost", "mechanisms": [self.case("cost", name) for name in names]}
                    for names in self.timed_together(list(trained))
                ],
            )
        if self.has("attention"):
            yield "attention", [{"kind": "attention", "mechanism": name, "of": case} for name, case in trained.items()]

    def timed_together(self, names: list[str]) -> list[list[str]]:
        """On a CPU all are timed in turns, so that a busy moment affects them alike. A GPU has no such moments, and
        compiled code of one mechanism would get in the way of the others'."""
        return [[name] for name in names] if self.place().type == "cuda" else [names] if names else []

    @property
    def compiles(self) -> bool:
        return bool(getattr(self, "compile", False))

    def title(self, case: Case) -> str:
        if case["kind"] == "cost":
            return "speed and memory of " + ", ".join(part["mechanism"] for part in case["mechanisms"])
        if case["kind"] == "attention":
            return f"attention of {case['mechanism']}"
        hidden = ("kind", "mechanism", "options", "config", "validation")
        words = [f"{key.replace('_', ' ')} {value}" for key, value in case.items() if key not in hidden]
        return ", ".join([case["mechanism"], *words, *(["validation"] if case["validation"] else [])])

    def measure(self, case: Case, work: Work) -> Mapping[str, Any]:  # type: ignore[override]
        """The result of a case of any kind."""
        result: Mapping[str, Any] = getattr(self, f"{case['kind']}_case")(case, work)
        return result

    def weights_of(self, case: Case, work: Work) -> Path:
        """The folder in which another case left its files."""
        return case_path(work.folder.parent, case)

    # The command.

    def run(self, screen: Screen) -> int:
        """Train, measure, save, print the table, write the page. Run again, it goes on where it stopped."""
        check_folder("output", self.folder)
        self.check_hosts()
        meta = describe_run(self.place()) | {
            "experiment": self.name, "config": self.values(), "metric": asdict(self.metric()), **self.describe(),
        }  # fmt: skip
        screen.say(f"{meta.get('about', self.name)}. Files: {self.folder}")
        self.prepare(screen)
        if self.compiles:  # else each worker would start a compiling process per core
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores() // self.at_a_time())))
        done: list[tuple[str, Outcome]] = []
        phases: Any = self.phases()
        kind, cases = next(phases)
        try:
            while True:
                outcomes = self.outcomes(screen, cases, alone=kind in ALONE)
                done += [(kind, outcome) for outcome in outcomes]
                kind, cases = phases.send(outcomes)
        except StopIteration:
            meta["finished"] = True
        except KeyboardInterrupt:
            found = [(case, find(self.folder / "cases", case)) for case in cases]
            done += [(kind, Outcome(case, result)) for case, result in found if result is not None]
            save_results(self.folder / "results.json", meta | {"finished": False}, self.rows(done))
            raise
        return self.finish(screen, meta, done)

    def outcomes(self, screen: Screen, cases: Sequence[Case] | None = None, *, alone: bool = False) -> list[Outcome]:
        """Measure cases that are not yet in the folder; ``alone``: one at a time, in this process."""
        here = alone or (self.where == "processes" and self.at_a_time() == 1)
        return run_cases(
            cases or [],
            self.measure,
            self.folder / "cases",
            where="here" if here and self.where != "ray" else self.where,
            jobs=1 if alone else self.at_a_time(),
            title=self.title,
            said=self.said,
            like=lambda case: case.get("mechanism"),
            screen=screen,
        )

    def said(self, outcome: Outcome) -> str:
        """A finished run in a line."""
        found = outcome.result or {}
        if "score" not in found:
            return ""
        return f"{self.title(outcome.case)}: {self.metric().text(found['score'])} in {found['seconds']:.0f} s"

    def rows(self, done: Sequence[tuple[str, Outcome]]) -> list[dict[str, Any]]:
        """A row for each outcome, without what all have in common."""
        found = []
        for kind, outcome in done:
            if kind == "cost":
                costs = (outcome.result or {}).get("costs", {})
                more = {key: value for key, value in (outcome.result or {}).items() if key != "costs"}
                found += [{"kind": kind, "mechanism": name, **cost, **more} for name, cost in costs.items()]
                continue
            row = {key: value for key, value in outcome.row().items() if key not in ("config", "of", "examples")}
            if kind == "sweep":
                row = {key: value for key, value in row.items() if key != "records"}
            if not row.get("options"):
                row.pop("options", None)
            found.append(row | {"kind": kind})
        return found

    def finish(self, screen: Screen, meta: dict[str, Any], done: Sequence[tuple[str, Outcome]]) -> int:
        """Save the results, print them, and write the page."""
        from linattn.lab.compare.findings import Findings

        rows = self.rows(done)
        findings = Findings(meta, rows)
        save_results(self.folder / "results.json", meta, rows)
        save_csv(self.folder / "results.csv", findings.csv_rows())
        save_csv(self.folder / "runs.csv", [_without(row, "kind", "records") for row in findings.of("run")])
        shown = [o.result["examples"] | {"name": o.case["mechanism"]} for kind, o in done
                 if kind == "attention" and o.result and o.result.get("examples")]  # fmt: skip
        if shown:
            images = [
                _without(image, "map") | {"maps": {other["name"]: other["images"][number]["map"] for other in shown}}
                for number, image in enumerate(shown[0]["images"])
            ]
            write_json(self.folder / "examples.json", {"layer": shown[0]["layer"], "images": images})
        screen.table(self.name, *self.table(rows))
        for sentence in findings.sentences:
            screen.say(sentence)
        screen.result({"meta": meta, "rows": rows})
        page = self.write_page(meta, rows)
        screen.say(f"page: {page}" if page else f"results: {self.folder / 'results.json'}")
        return FAILED if any(outcome.error for _, outcome in done) else RIGHT

    def write_page(self, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Path | None:
        if not all(map(find_spec, ("pandas", "jinja2", "matplotlib"))):
            return None
        from linattn.lab.compare.page import write_comparison

        path = self.folder / "examples.json"
        examples = json.loads(path.read_text()) if path.exists() else None
        return write_comparison(self.folder, meta, rows, examples, self.sections(meta, rows))

    def table(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[object]]]:
        from linattn.lab.compare.findings import Findings

        return Findings({"metric": asdict(self.metric())}, rows).short_table()

    def sections(self, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> "list[Section]":
        """What a kind of comparison adds to the page."""
        return []


def scores_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """The scores of the final runs, by name and seed; a name without a score has none."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["kind"] == "run":
            scores = found.setdefault(row["mechanism"], {})
            if isinstance(row.get("score"), int | float) and isfinite(row["score"]):
                scores[row["seed"]] = row["score"]
    return found


def _without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in names}
