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
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch

from linattn.lab.cases import Case, Outcome, Work, case_path
from linattn.lab.compare.findings import Findings, Metric
from linattn.lab.experiment import FAILED, RIGHT, Experiment
from linattn.lab.screen import Screen
from linattn.lab.train.config import check_owners, options_of
from linattn.mechanisms.registry import list_mechanisms
from linattn.support.config import option
from linattn.support.files import write_json
from linattn.support.machine import cores, describe_run
from linattn.support.options import OptionError, check_folder

Point = dict[str, Any]
Phase = tuple[str, list[dict[str, Any]]]
UNSAID = ("kind", "mechanism", "mechanisms", "options", "config", "validation", "of")
ALONE = ("cost", "attention")  # phases whose cases are not measured beside others


@dataclass(frozen=True, kw_only=True)
class Comparison(Experiment):
    """The base of comparisons. Cases are measured by a method of the config, ``<kind>_case(case, work)``.

    ``run_case`` trains ``case["mechanism"]`` with ``case["seed"]`` at the point in ``case``, on held-out data if
    ``case["validation"]``. Its result has ``score``, ``seconds`` of training and ``records``: the evaluations in order,
    each with the number of rounds trained, ``train_loss`` and ``score``. ``cost_case`` has ``rows``, one for each of
    ``case["mechanisms"]``, with how ``busy`` the machine was; ``attention_case`` says what attention does in the model
    that the run ``case["of"]`` trained.
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

    of_cases: ClassVar[tuple[str, ...]] = ("mechanisms", "seeds", "lr", "option", "margin", "device")
    """Options that a case has in its own fields, or that say which cases there are: they are not common to all."""
    sweep_seeds: ClassVar[int] = 1
    sweep_is_final: ClassVar[bool] = False
    """Whether runs that choose a point train on all training data: the best is then the run of the first seed, too.
    Their result has ``validation``, too, which is then a score."""

    # What a kind of comparison defines.

    def metric(self) -> Metric:
        return Metric()

    def check_hosts(self) -> None:
        """Raise an OptionError if a contender does not fit, before anything is trained."""

    def prepare(self, screen: Screen) -> None:
        """Make data that all processes share, before they start."""

    def describe(self) -> dict[str, Any]:
        """Of the ``meta`` of results: ``data`` and ``host``, and ``about``: all of it in a sentence."""
        return {}

    def contenders(self) -> tuple[str, ...]:
        """What is compared, each once."""
        return tuple(dict.fromkeys(self.mechanisms))

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

    @property
    def of_trained(self) -> dict[str, dict[str, Any]]:
        """What is measured of each trained model in the end: kinds of cases, and the fields that they have besides."""
        return {}

    def check(self) -> None:
        super().check()
        if not self.contenders():
            raise OptionError("mechanisms", f"name at least one of {', '.join(list_mechanisms())}")
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
        runs = [(name, seed) for name in self.contenders() for seed in range(self.seeds)]
        runs = runs if self.compiles else sorted(runs, key=lambda run: run[1])
        return [self.case("run", name, seed=seed, **chosen[name], validation=False) for name, seed in runs]

    def choose(self, swept: Sequence[Outcome]) -> dict[str, Point]:
        """For each contender the point with the best mean validation score; among equals the first."""
        key = "validation" if self.sweep_is_final else "score"
        chosen = {}
        for name in self.contenders():
            points, scores = self.points(name), dict[int, float]()
            for number, point in enumerate(points):
                runs = [o for o in swept if o.case["mechanism"] == name and point.items() <= dict(o.case).items()]
                if runs and all(run.result for run in runs):
                    scores[number] = fmean(run.result[key] for run in runs if run.result)
            chosen[name] = points[self.metric().best(scores) if scores else 0]
        return chosen

    def phases(self) -> Generator[Phase, list[Outcome], None]:
        """The phases in order. A generator that is sent the outcomes of a phase before it yields the next one."""
        swept = yield "sweep", self.sweep_cases()
        runs = yield "run", self.final_cases(self.choose(swept))
        # Only trained ones: what failed in training would fail again.
        trained = {o.case["mechanism"]: o.case for o in runs if not o.error and o.case["seed"] == 0}
        # On a CPU all are timed in turns, so that a busy moment affects them alike. A GPU has no such moments, and
        # compiled code of one mechanism would get in the way of the others'.
        together = [[name] for name in trained] if self.place().type == "cuda" else [list(trained)] if trained else []
        parts = [[self.case("cost", name) for name in names] for names in together]
        yield "cost", [{"kind": "cost", "mechanisms": part} for part in parts]
        for kind, more in self.of_trained.items():
            yield kind, [{"kind": kind, "mechanism": name, **more, "of": case} for name, case in trained.items()]

    @property
    def compiles(self) -> bool:
        return bool(getattr(self, "compile", False))

    def title(self, case: Case) -> str:
        names = (
            case["mechanism"] if "mechanism" in case else ", ".join(part["mechanism"] for part in case["mechanisms"])
        )
        kind = "validation" if case.get("validation") else "" if case["kind"] == "run" else case["kind"]
        words = [f"{key.replace('_', ' ')} {value}" for key, value in case.items() if key not in UNSAID]
        return ", ".join(filter(None, [names, *words, kind]))

    def measure(self, case: Case, work: Work) -> Mapping[str, Any]:  # type: ignore[override]
        """The result of a case of any kind."""
        result: Mapping[str, Any] = getattr(self, f"{case['kind']}_case")(case, work)
        return result

    def weights_of(self, case: Case, work: Work) -> Path:
        """The folder in which another case left its files."""
        return case_path(work.folder.parent, case)

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes make a config anew, with its data, once for all cases that they are given."""
        return _made_once, (type(self), json.dumps(self.values()))

    # The command.

    def run(self, screen: Screen) -> int:
        """Train, measure, save, print the table, write the page. Run again, it goes on where it stopped."""
        check_folder("output", self.folder)
        self.check_hosts()
        meta = describe_run(self.place()) | {"experiment": self.name, "config": self.values()}
        meta |= {"metric": asdict(self.metric()), **self.describe()}
        screen.say(f"{meta.get('about', self.name)}. Files: {self.folder}")
        self.prepare(screen)
        if self.compiles:  # else each worker would start a compiling process per core
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores() // self.at_a_time())))

        def said(outcome: Outcome) -> str:
            found = outcome.result or {}
            score = self.metric().text(found["score"]) if "score" in found else ""
            return f"{self.title(outcome.case)}: {score} in {found['seconds']:.0f} s" if score else ""

        done: list[tuple[str, Outcome]] = []
        phases, outcomes = self.phases(), None
        while True:
            try:
                kind, cases = phases.send(outcomes)  # type: ignore[arg-type]
            except StopIteration:
                break
            alone = {"jobs": 1, "where": "ray" if self.where == "ray" else "here"} if kind in ALONE else {}
            likes = {"like": lambda case: case.get("mechanism")} if self.compiles else {}
            outcomes = self.outcomes(screen, cases, said=said, **alone, **likes)
            done += [(kind, outcome) for outcome in outcomes]
        return self.finish(screen, meta, done)

    def rows(self, done: Sequence[tuple[str, Outcome]]) -> list[dict[str, Any]]:
        """A row for each outcome, or for each mechanism in it, without what all have in common."""
        found = []
        for kind, row in ((kind, row | {"kind": kind}) for kind, outcome in done for row in outcome.rows()):
            left_out = {"mechanisms", "of", "examples", *(["records"] if kind == "sweep" else [])}
            left_out |= set() if row.get("options") else {"options"}
            if "mechanism" in row:
                found.append({key: value for key, value in row.items() if key not in left_out})
        return found

    def finish(self, screen: Screen, meta: dict[str, Any], done: Sequence[tuple[str, Outcome]]) -> int:
        """Save the results, print them, and write the page."""
        rows = self.rows(done)
        shown = [(o.case["mechanism"], o.result["examples"]) for _, o in done if o.result and "examples" in o.result]
        if shown:
            layer, images = shown[0][1]["layer"], [dict(image) for image in shown[0][1]["images"]]
            for number, image in enumerate(images):
                del image["map"]
                image["maps"] = {name: examples["images"][number]["map"] for name, examples in shown}
            write_json(self.folder / "examples.json", {"layer": layer, "images": images})
        self.show(screen, meta, rows, rows, Findings(meta, rows).sentences)
        return FAILED if any(outcome.error for _, outcome in done) else RIGHT

    def page(self, meta: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
        from linattn.lab.compare.page import comparison_page

        path = self.folder / "examples.json"
        examples = json.loads(path.read_text()) if path.exists() else {}
        return comparison_page(Findings(meta, rows), examples)

    def table(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[object]]]:
        return Findings({"metric": asdict(self.metric())}, rows).short_table()


@lru_cache(maxsize=2)
def _made_once(kind: type[Comparison], values: str) -> Comparison:
    return kind(**kind.typed(json.loads(values)))


@lru_cache(maxsize=1)
def start_compiling(contender: str) -> None:
    """Forget what was compiled for another contender: every call would first be checked against all of it."""
    torch._dynamo.reset()
