"""``linattn lab icl``: one-layer models trained on linear tasks in context, beside the least risk in closed form.

A unit is a family of data and a model: all its cases, numbers of examples and seeds are one stack of models, trained
together by Adam on fresh tasks at every step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from linattn.lab.cases import Case as KeptCase
from linattn.lab.cases import Work
from linattn.lab.experiment import Experiment
from linattn.lab.theory.icl.curves import FAMILIES, curves
from linattn.lab.theory.icl.data import Weighting
from linattn.lab.theory.icl.learning import (
    Cell,
    TaskStream,
    generator,
    learnt_steps,
    measure_risks,
    step_errors,
    trained,
)
from linattn.mechanisms.registry import list_mechanisms
from linattn.support.config import option
from linattn.support.options import OptionError

if TYPE_CHECKING:
    from pandas import DataFrame

    from linattn.lab.page import Section

LINEAR, H3, GATED, CANON = MODELS = ("linear", "h3", "gated", "canon")  # besides these, any registered mechanism
EXACT = (LINEAR, H3)  # the formula is their optimum; for the others it is that of a restricted form
RANKED = ("low-rank", "low-rank-update")  # statements about linear attention
EVERYWHERE = ("independent", "drift")  # families on which all models are trained unless models are named
WEIGHTING: dict[str, Weighting] = {H3: "free", GATED: "geometric"}  # of the formula to compare with
USUAL = {"d": 20, "lengths": (5, 10, 20, 40, 60), "seeds": 2, "steps": 2000, "batch": 512, "lr": 0.01,
         "tests": 1 << 18, "tolerance": 0.02}  # fmt: skip
QUICK = {"d": 5, "lengths": (3, 6, 12), "seeds": 1, "steps": 400, "batch": 256, "lr": 0.03,
         "tests": 1 << 15, "tolerance": 0.05}  # fmt: skip


def usual(name: str) -> str:
    """The defaults of an option, in words."""
    full, quick = (",".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in (USUAL[name], QUICK[name]))
    return f"{full}, with --quick {quick}"


@dataclass(frozen=True, kw_only=True)
class Icl(Experiment):
    """In-context linear estimation: trained models and closed forms.

    Linear attention is one step of preconditioned gradient descent, H3 one with weights for the examples. Both are
    trained on independent, retrieved, aligned and drifting examples, at low rank and as low-rank updates (LoRA), with
    gated linear attention and Canon beside them. Figures show trained models solid and formulas dotted. Exit code 1:
    the best seed of linear or h3 is farther from its formula than the tolerance.
    """

    name = "lab-icl"
    quick: bool = option(False, "Five dimensions: the whole experiment in minutes on a CPU.", affects=False)
    families: tuple[str, ...] = option(FAMILIES, "Experiments.", choices=FAMILIES, group="What")
    models: tuple[str, ...] = option(
        (), "linear, h3, gated, canon, or any causal mechanism by its name.", group="What",
        choices=lambda: (*MODELS, *list_mechanisms(causal=True)),
        default_text="linear and h3; all of them on independent examples and drifting tasks",
    )  # fmt: skip
    d: int | None = option(None, "Dimension of the features.", least=2, default_text=usual("d"), group="What")
    lengths: tuple[int, ...] = option((), "Numbers of examples.", least=1, default_text=usual("lengths"), group="What")
    seeds: int | None = option(None, "Models of each kind.", least=1, default_text=usual("seeds"), group="What")
    steps: int | None = option(None, "Training steps.", least=1, default_text=usual("steps"), group="Training")
    batch: int | None = option(None, "Tasks in a step.", least=2, default_text=usual("batch"), group="Training")
    lr: float | None = option(None, "Largest learning rate.", above=0, default_text=usual("lr"), group="Training")
    tests: int | None = option(None, "Tasks of a risk.", least=2, default_text=usual("tests"), group="Training")
    tolerance: float | None = option(
        None, "Relative distance to the formula.", above=0, default_text=usual("tolerance"), affects=False
    )
    seed: int = option(0, "Seed of weights and tasks.", least=0, group="Training")

    def check(self) -> None:
        if len(set(self.lengths)) < len(self.lengths):
            raise OptionError("lengths", f"must differ, got {', '.join(map(str, self.lengths))}")
        if not self.units():
            named = ", ".join(self.models)
            raise OptionError("models", f"{' and '.join(self.families)} are about {LINEAR} alone, got {named}")

    def chosen(self, name: str) -> Any:
        """The value of an option, by ``quick`` where it was not given."""
        return getattr(self, name) or (QUICK if self.quick else USUAL)[name]

    def units(self) -> list[tuple[str, str]]:
        return [(family, model) for family in self.families for model in self._models_of(family)]

    def _models_of(self, family: str) -> tuple[str, ...]:
        if family in RANKED:
            return (LINEAR,) if not self.models or LINEAR in self.models else ()
        return self.models or (MODELS if family in EVERYWHERE else EXACT)

    def cases(self) -> list[dict[str, Any]]:
        names = ("d", "lengths", "seeds", "steps", "batch", "lr", "tests")
        config = {name: self.chosen(name) for name in names} | {"seed": self.seed, "device": self.place().type}
        return [{"family": family, "model": model, "config": config} for family, model in self.units()]

    @staticmethod
    def measure(case: KeptCase, work: Work) -> dict[str, Any]:
        """Train the models of all curves, lengths and seeds of a family at once; a row for each."""
        family, model, config = case["family"], case["model"], case["config"]
        cells = [
            Cell(curve, n, seed)
            for curve in curves(family, config["d"])
            for n in config["lengths"]
            for seed in range(config["seeds"])
        ]
        optima = [cell.curve.optimum(cell.n, WEIGHTING.get(model, "uniform")) for cell in cells]
        stack = trained(config, family, model, cells, work)
        # Seeded by the family alone, so that all its models are tested on the same tasks.
        stream = TaskStream(cells, generator(config, "test", family))
        risks = measure_risks(stack, stream, optima, config["tests"], 2 * config["batch"])
        steps: list[Any] = [None] * len(cells)
        if model in MODELS:  # mechanisms that divide have no W
            steps = step_errors(learnt_steps(stack, stream), optima)
        rows = []
        for cell, optimum, step, risk, error, formula in zip(cells, optima, steps, *risks, strict=True):
            unit = cell.curve.data.power / config["d"]
            theory = optimum.risk / config["d"]
            rows.append({
                "case": cell.curve.label, "n": cell.n, "seed": cell.seed, "theory": theory,
                "formula_measured": formula * unit, "trained": risk * unit, "standard_error": error * unit,
                "deviation": risk * unit / theory - 1,
                "excess": risk / formula - 1,  # the luck of the test tasks cancels
                "step_error": step,
            })  # fmt: skip
        return {"rows": rows}

    def wrong(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Models whose optimum the formula is, but whose best seed is farther from it than the tolerance, by more than
        the luck of the test tasks (two standard errors) explains."""
        best: dict[tuple[str, ...], Mapping[str, Any]] = {}
        for row in (row for row in rows if row["model"] in EXACT):
            place = tuple(str(row[name]) for name in ("family", "case", "model", "n"))
            if place not in best or not row["trained"] >= best[place]["trained"]:
                best[place] = row
        tolerance = self.chosen("tolerance")
        allowed = [(row, tolerance + 2 * row["standard_error"] / row["theory"]) for row in best.values()]
        beyond = [row for row, most in allowed if not abs(row["deviation"]) <= most]
        said = [f"beyond the tolerance: {row['model']}, {place_of(row)}: {signed(row['deviation'])}" for row in beyond]
        return [*said[:8], *([f"and {len(said) - 8} more"] if len(said) > 8 else [])]

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        from linattn.lab.theory.icl.figures import summary

        return summary(rows, self.chosen("tolerance"))

    def table(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[object]]]:
        """Risk / d of the best seed, and the run farthest from its formula."""
        lengths = sorted({row["n"] for row in rows})
        shown: list[list[object]] = []
        for key in dict.fromkeys((row["family"], row["case"], row["model"]) for row in rows):
            own = [row for row in rows if (row["family"], row["case"], row["model"]) == key]
            worst = max((row["deviation"] for row in own), key=abs)
            best = [min((row["trained"] for row in own if row["n"] == n), default=None) for n in lengths]
            shown.append([*key, *(None if risk is None else f"{risk:.3f}" for risk in best), signed(worst)])
        return ["family", "case", "model", *(f"n = {n}" for n in lengths), "from formula"], shown

    def figures(self, frame: "DataFrame", meta: Mapping[str, Any]) -> "list[Section]":
        from linattn.lab.theory.icl.figures import sections

        return sections(frame)


def place_of(row: Mapping[str, Any]) -> str:
    return f"{row['family']}, {row['case']}, n = {row['n']}, seed {row['seed']}"


def signed(share: float) -> str:
    return f"{100 * share:+.2f} %"
