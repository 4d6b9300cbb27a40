"""``linattn lab icl``: one-layer models trained on linear tasks in context, beside the least risk in closed form.

A unit is a family of data and a model: all its cases, numbers of examples and seeds are one stack of models, trained
together by Adam on fresh tasks at every step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

from torch import Generator

from linattn.lab.cases import Case, Work
from linattn.lab.convert.curves import Curves, chart
from linattn.lab.page import Section
from linattn.lab.theory import icl_models as stacks
from linattn.lab.theory.icl_models import Cell, TaskStream
from linattn.lab.theory.icl_tasks import FAMILIES, Weighting, curves
from linattn.lab.theory.laboratory import Laboratory, sized
from linattn.support.config import option
from linattn.support.options import OptionError

if TYPE_CHECKING:
    from pandas import DataFrame

Row = Mapping[str, Any]
LINEAR, H3, GATED, CANON = MODELS = tuple(stacks.STACKS)
EXACT = (LINEAR, H3)  # the formula is their optimum; for the others it is that of a restricted form
RANKED = ("low-rank", "low-rank-update")  # statements about linear attention
EVERYWHERE = ("independent", "drift")  # families on which all models are trained unless models are named
WEIGHTING: dict[str, Weighting] = {H3: "free", GATED: "geometric"}  # of the formula to compare with
READING = "Risk E (y - f)² / d against the number of examples: lines are the best of trained seeds, dotted formulas. "
SEEN = {  # what there is to see
    "independent": "Examples may be swapped: weighting them gains nothing, H3 and linear attention have one formula.",
    "retrieval": "a: correlation of the features with the query's. The more, the fewer examples are needed.",
    "alignment": "a: how far features lean towards the task vector.",
    "low-rank": "Wq and Wk have r columns. Eigenvalues of the tasks' covariance fall as 1/i.",
    "low-rank-update": "Trained on one covariance of tasks, then an update of rank r is learnt on another one (LoRA).",
    "drift": "An example's task correlates by memory^age with the query's: free weights (H3) can forget, equal ones "
    "(linear attention) cannot. Dotted: free weights, the best constant gate, equal weights.",
}


@dataclass(frozen=True, kw_only=True)
class Icl(Laboratory):
    """In-context linear estimation: trained models and closed forms.

    Linear attention is one step of preconditioned gradient descent, H3 one with weights for the examples. Both are
    trained on independent, retrieved, aligned and drifting examples, at low rank and as low-rank updates (LoRA), with
    gated linear attention and Canon beside them. Figures show trained models solid and formulas dotted. Exit code 1:
    the best seed of linear or h3 is farther from its formula than the tolerance.
    """

    name = "lab-icl"
    families: tuple[str, ...] = option(FAMILIES, "Experiments.", choices=FAMILIES, group="What")
    models: tuple[str, ...] = option(
        (), "linear, h3, gated, canon.", group="What", choices=MODELS,
        default_text="linear and h3; all of them on independent examples and drifting tasks",
    )  # fmt: skip
    d: int = sized(20, 5, "Dimension of the features.", least=2, group="What")
    lengths: tuple[int, ...] = sized((5, 10, 20, 40, 60), (3, 6, 12), "Numbers of examples.", least=1, group="What")
    seeds: int = sized(2, 1, "Models of each kind.", least=1, group="What")
    steps: int = sized(2000, 400, "Training steps.", least=1, group="Training")
    batch: int = sized(512, 256, "Tasks in a step.", least=2, group="Training")
    lr: float = sized(0.01, 0.03, "Largest learning rate.", above=0, group="Training")
    tests: int = sized(1 << 18, 1 << 15, "Tasks of a risk.", least=2, group="Training")
    tolerance: float = sized(0.02, 0.05, "Relative distance to the formula.", above=0, affects=False)
    seed: int = option(0, "Seed of weights and tasks.", least=0, group="Training")

    def check(self) -> None:
        if len(set(self.lengths)) < max(len(self.lengths), 1):
            raise OptionError("lengths", f"must be different numbers, got {', '.join(map(str, self.lengths))}")
        if not self.units():
            named = ", ".join(self.models)
            raise OptionError("models", f"{' and '.join(self.families)} are about {LINEAR} alone, got {named}")

    def units(self) -> list[tuple[str, str]]:
        found = []
        for family in self.families:
            models = self.models or (MODELS if family in EVERYWHERE else EXACT)
            found += [(family, model) for model in models if model == LINEAR or family not in RANKED]
        return found

    def cases(self) -> list[dict[str, Any]]:
        names = ("d", "lengths", "seeds", "steps", "batch", "lr", "tests", "seed")
        config = {name: getattr(self, name) for name in names} | {"device": self.place().type}
        return [{"family": family, "model": model, "config": config} for family, model in self.units()]

    @staticmethod
    def measure(case: Case, work: Work) -> dict[str, Any]:
        """Train the models of all curves, lengths and seeds of a family at once; a row for each."""
        family, model, config = case["family"], case["model"], case["config"]
        cells = [Cell(curve, n, seed) for curve in curves(family, config["d"]) for n in config["lengths"]
                 for seed in range(config["seeds"])]  # fmt: skip
        stack = trained(config, family, model, cells, work)
        # Seeded by the family alone, so that all its models are tested on the same tasks.
        stream = TaskStream(cells, generator(config, "test", family))
        risks = stacks.measure_risks(stack, stream, config["tests"], 2 * config["batch"])
        rows = []
        for cell, risk, error in zip(cells, *risks, strict=True):
            unit = cell.curve.data.power / config["d"]
            theory = cell.curve.optimum(cell.n, WEIGHTING.get(model, "uniform")).risk / config["d"]
            rows.append({
                "case": cell.curve.label, "n": cell.n, "seed": cell.seed, "theory": theory, "trained": risk * unit,
                "standard_error": error * unit, "deviation": risk * unit / theory - 1,
            })  # fmt: skip
        return {"rows": rows}

    def wrong(self, rows: Sequence[Row]) -> list[str]:
        """Models whose optimum the formula is, but whose best seed is farther from it than the tolerance, by more than
        the luck of the test tasks (two standard errors) explains."""
        exact = sorted((row for row in rows if row["model"] in EXACT), key=lambda row: -row["trained"])
        best = {(row["family"], row["case"], row["model"], row["n"]): row for row in exact}
        allowed = {place: self.tolerance + 2 * row["standard_error"] / row["theory"] for place, row in best.items()}
        return [f"beyond the tolerance: {', '.join(map(str, place))}: {signed(row['deviation'])}"
                for place, row in best.items() if not abs(row["deviation"]) <= allowed[place]]  # fmt: skip

    def sentences(self, rows: Sequence[Row]) -> list[str]:
        """A sentence per model, then H3 beside linear attention."""
        said = []
        for model in dict.fromkeys(row["model"] for row in rows):
            off = sorted(row["deviation"] for row in rows if row["model"] == model)
            within = f"{sum(abs(share) <= self.tolerance for share in off)} of {len(off)}"
            formula = {LINEAR: "its formula", H3: "its formula", GATED: "the best constant gate"}.get(model, LINEAR)
            said.append(f"{model}: {within} runs within {100 * self.tolerance:g} % of {formula}, "
                        f"all within {signed(off[0])} to {signed(off[-1])}.")  # fmt: skip
        if found := gains(rows):
            best = max(found, key=lambda gain: gain["by the formulas"])
            far = max(abs(gain["measured"] - gain["by the formulas"]) for gain in found)
            said.append(f"H3 gains up to {best['measured']:.1f} % of the risk ({best['data']}), by the formulas "
                        f"{best['by the formulas']:.1f} %; gain and formula differ by at most {far:.2f}.")  # fmt: skip
        return said

    def table(self, rows: Sequence[Row]) -> tuple[list[str], list[list[object]]]:
        """Risk / d of the best seed, and the run farthest from its formula."""
        shown: list[list[object]] = []
        for key in dict.fromkeys((row["family"], row["case"], row["model"]) for row in rows):
            own = [row for row in rows if (row["family"], row["case"], row["model"]) == key]
            best = [f"{min(row['trained'] for row in own if row['n'] == n):.3f}" for n in self.lengths]
            shown.append([*key, *best, signed(max((row["deviation"] for row in own), key=abs))])
        return ["family", "case", "model", *(f"n = {n}" for n in self.lengths), "from formula"], shown

    def figures(self, frame: "DataFrame", meta: Row) -> list[Section]:
        """Risks by family, and every trained model."""
        parts: list[Section] = []
        for family, own in frame.groupby("family", sort=False):
            # One panel per model with a line per case or, where models are compared, the other way round.
            panels, lines = ("case", "model") if family == "drift" else ("model", "case")
            limits = None if family == "drift" else (0, 1.05 * own[["theory", "trained"]].to_numpy().max())
            made = [
                (f"{title}: risk / d", "examples n", lines_of(shown, lines, "trained"),
                 {"limits": limits, "dotted": list(lines_of(shown, lines, "theory").values())})
                for title, shown in own.groupby(panels, sort=False)
            ]  # fmt: skip
            parts += chart(f"icl-{family}", family.replace("-", " ").capitalize(), READING + SEEN[family], *made)
        return [*parts, Section("Every trained model", table=frame, units={"theory": "risk/d", "trained": "risk/d"})]


def trained(config: Row, family: str, model: str, cells: Sequence[Cell], work: Work) -> Any:
    """The stack of a unit after training; an update's base is trained first."""
    drawn = generator(config, "train", family, model)
    stream, width, count = TaskStream(cells, drawn), config["d"] + 1, len(cells)
    ranks = [cell.curve.rank or 0 for cell in cells]
    settings = config["steps"], config["batch"], config["lr"]
    more = {"low-rank": [ranks]}.get(family, [stream.most + 1] if model == H3 else [])
    stack: Any = stacks.STACKS[model](count, width, drawn, *more)
    if family == "low-rank-update":
        before = TaskStream(cells, drawn, sources=True)
        stacks.fit(stack, before, *settings, lambda share: work.tell(share, "before"))
        stack = stacks.AdaptedStack(stack, width, drawn, ranks)
    stacks.fit(stack, stream, *settings, lambda share: work.tell(share, ""))
    return stack


def generator(config: Row, *names: str) -> Generator:
    seed = crc32(" ".join(names).encode()) + (config["seed"] << 32)
    return Generator(device=config["device"]).manual_seed(seed)


def gains(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What H3 gains over linear attention, in percent of the latter's risk: measured, and by the formulas."""
    found = []
    for place in dict.fromkeys((row["family"], row["case"], row["n"]) for row in rows):
        own = [row for row in rows if (row["family"], row["case"], row["n"]) == place]
        linear, h3 = ([row for row in own if row["model"] == model] for model in (LINEAR, H3))
        if linear and h3:
            measured = 1 - min(row["trained"] for row in h3) / min(row["trained"] for row in linear)
            theory = 1 - h3[0]["theory"] / linear[0]["theory"]
            found.append({"data": "{}, {}, n = {}".format(*place), "measured": 100 * measured,
                          "by the formulas": 100 * theory})  # fmt: skip
    return found


def lines_of(frame: "DataFrame", by: str, value: str) -> Curves:
    """For each name in a column, the least value by number of examples."""
    return {name: list(own.groupby("n")[value].min().items()) for name, own in frame.groupby(by, sort=False)}


def signed(share: float) -> str:
    return f"{100 * share:+.2f} %"
