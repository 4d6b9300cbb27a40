"""``linattn lab icl``: one-layer models trained on linear tasks in context, beside the least risk in closed form.

A unit is a family of data and a model: all its cases, numbers of examples and seeds are one stack of models, trained
together by Adam on fresh tasks at every step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor, nn

from linattn.lab.cases import Work
from linattn.lab.experiment import Experiment
from linattn.lab.kept import Case as KeptCase
from linattn.lab.theory.icl.data import (
    Aligned,
    DataModel,
    Drift,
    Gaussian,
    Optimum,
    Retrieval,
    Weighting,
    equicorrelated,
    power_law,
)
from linattn.lab.theory.icl.models import AdaptedStack, LinearStack, make_stack
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
WARM_UP = 0.05  # share of all steps
USUAL = {"d": 20, "lengths": (5, 10, 20, 40, 60), "seeds": 2, "steps": 2000, "batch": 512, "lr": 0.01,
         "tests": 1 << 18, "tolerance": 0.02}  # fmt: skip
QUICK = {"d": 5, "lengths": (3, 6, 12), "seeds": 1, "steps": 400, "batch": 256, "lr": 0.03,
         "tests": 1 << 15, "tolerance": 0.05}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Curve:
    """Tasks of ``data``. With a ``rank``, attention has that rank; with a ``source`` as well, it is an update of that
    rank to a model that was trained on ``source``."""

    label: str
    data: DataModel
    rank: int | None = None
    source: DataModel | None = None

    def optimum(self, n: int, weighting: Weighting = "uniform") -> Optimum:
        if self.rank is None:
            return self.data.optimum(n, weighting)
        if not isinstance(self.data, Gaussian) or not isinstance(self.source, Gaussian | None):
            raise TypeError(f"a rank needs independent examples, got {type(self.data).__name__}")
        if self.source is None:
            return self.data.low_rank(n, self.rank)
        return self.data.adapted(n, self.rank, self.source)


def curves(family: str, d: int) -> list[Curve]:
    """The curves of a family's figure."""
    ranks = sorted({max(d // 20, 1), max(d // 5, 2), max(d // 2, 3), d})
    tasks, features = equicorrelated(d, 0.3), power_law(d, 0.5, seed=1)
    # The same eigenvalues along other directions: what was learnt has the right size and the wrong place.
    source, target = (Gaussian(d, task_covariance=power_law(d, 1.0, seed)) for seed in (2, 3))
    found = {
        "independent": [
            Curve("isotropic", Gaussian(d)),
            Curve("noisy labels", Gaussian(d, noise=d / 4)),
            Curve("tasks correlated", Gaussian(d, task_covariance=equicorrelated(d, 0.5))),
            Curve("both covariances", Gaussian(d, d / 20, task_covariance=tasks, feature_covariance=features)),
        ],
        "retrieval": [Curve(f"a = {a:g}", Retrieval(d, alignment=a)) for a in (0.0, 0.2, 0.4, 0.6)],
        "alignment": [Curve(f"a = {a:g}", Aligned(d, alignment=a)) for a in (0.0, 0.2, 0.4, 0.6)],
        "low-rank": [Curve(f"rank {r}", Gaussian(d, task_covariance=power_law(d, 1.0)), rank=r) for r in ranks],
        "low-rank-update": [Curve(f"rank {r}", target, rank=r, source=source) for r in (0, *ranks)],
        "drift": [Curve(f"memory {rho:g}", Drift(d, memory=rho)) for rho in (1.0, 0.95, 0.8)],
    }
    return found[family]


FAMILIES = ("independent", "retrieval", "alignment", "low-rank", "low-rank-update", "drift")


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


# Tasks for a stack of models.


@dataclass(frozen=True, eq=False)
class Cell:
    """One model of a stack: a curve, a number of examples, and which of several equal runs this is."""

    curve: Curve
    n: int
    seed: int


class TaskStream:
    """Fresh tasks for the cells, in their order; all cells of a curve must be adjacent.

    Tasks with fewer examples than the largest number have zeros in front. With ``sources`` tasks come from the data
    that a curve was trained on before.
    """

    def __init__(self, cells: Sequence[Cell], generator: torch.Generator, *, sources: bool = False) -> None:
        self.cells, self.generator = cells, generator
        self.most = max(cell.n for cell in cells)
        self.groups: list[tuple[DataModel, int]] = []  # data, number of cells
        for cell in cells:
            data = (cell.curve.source or cell.curve.data) if sources else cell.curve.data
            if self.groups and self.groups[-1][0] is data:
                self.groups[-1] = data, self.groups[-1][1] + 1
            else:
                self.groups.append((data, 1))
        self.width = self.groups[0][0].d + 1
        self.counts = torch.tensor([cell.n for cell in cells], device=generator.device)
        place = torch.arange(self.most, device=generator.device)
        self.real = (place >= self.most - self.counts.unsqueeze(1))[:, None, :, None].float()  # (M, 1, n, 1)

    def draw(self, batch: int) -> tuple[Tensor, Tensor]:
        """Tokens ``(M, B, T, d+1)`` and answers ``(M, B)``; labels are in units of their standard deviation."""
        M, T = len(self.cells), self.most + 1
        tokens = torch.zeros(M, batch, T, self.width, device=self.generator.device)
        answers = torch.empty(M, batch, device=self.generator.device)
        begin = 0
        for data, count in self.groups:
            rows = slice(begin, begin + count)
            drawn = data.sample((count, batch), self.most, self.generator)
            unit = data.power**-0.5
            torch.mul(drawn.x, self.real[rows], out=tokens[rows, :, :-1, :-1])
            torch.mul(drawn.y * unit, self.real[rows].squeeze(-1), out=tokens[rows, :, :-1, -1])
            tokens[rows, :, -1, :-1] = drawn.query
            answers[rows] = drawn.answer * unit
            begin += count
        return tokens, answers


# Training.


def trained(config: Mapping[str, Any], family: str, model: str, cells: Sequence[Cell], work: Work) -> nn.Module:
    """The stack of a unit after training; an update's base is trained first."""
    drawn = generator(config, "train", family, model)
    stream, width, count = TaskStream(cells, drawn), config["d"] + 1, len(cells)
    ranks = [cell.curve.rank or 0 for cell in cells]
    settings = config["steps"], config["batch"], config["lr"]
    if family == "low-rank-update":
        base = LinearStack(count, width, drawn)
        fit(base, TaskStream(cells, drawn, sources=True), *settings, lambda share: work.tell(share / 2, "before"))
        stack: nn.Module = AdaptedStack(base, width, drawn, ranks)
        fit(stack, stream, *settings, lambda share: work.tell((1 + share) / 2, "update"))
        return stack
    if family == "low-rank":
        stack = LinearStack(count, width, drawn, ranks)
    else:
        stack = make_stack(model, count, width, stream.most + 1, drawn)
    fit(stack, stream, *settings, lambda share: work.tell(share, ""))
    return stack


def generator(config: Mapping[str, Any], *names: str) -> torch.Generator:
    seed = crc32(" ".join(names).encode()) + (config["seed"] << 32)
    return torch.Generator(device=config["device"]).manual_seed(seed)


def fit(
    stack: nn.Module, stream: TaskStream, steps: int, batch: int, lr: float, tell: Callable[[float], None] | None = None
) -> None:
    """``steps`` of ``batch`` tasks per model; the learning rate rises, then falls as a cosine to 0."""
    parameters = [p for p in stack.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    for step in range(steps):
        tokens, answers = stream.draw(batch)
        # A sum over models: each model's gradient is that of its own loss.
        loss = (predict(stack, tokens, stream.counts) - answers).square().mean(1).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if tell is not None:
            tell((step + 1) / steps)


def predict(stack: nn.Module, tokens: Tensor, counts: Tensor) -> Tensor:
    """Answers ``(M, B)``: the model's sum over examples, divided by their number, so that weights are of order 1."""
    answers: Tensor = stack(tokens) / counts.unsqueeze(1)
    return answers


def rate(step: int, steps: int) -> float:
    """Factor of the learning rate at a step, counted from 0."""
    rise = max(round(WARM_UP * steps), 1)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + cos(pi * (step - rise) / max(steps - rise, 1)))


# Measurement.


@torch.no_grad()
def measure_risks(
    stack: nn.Module, stream: TaskStream, optima: Sequence[Optimum], tasks: int, batch: int
) -> tuple[list[float], list[float], list[float]]:
    """Risks of the models, their standard errors, and risks of the ``optima``, which belong to the stream's cells.

    They are means over the same test tasks, in units of the labels' variance.
    """
    W, w = _predictors(optima, stream)
    sums = torch.zeros(3, len(optima), dtype=torch.float64, device=W.device)
    drawn = 0
    while drawn < tasks:
        tokens, answers = stream.draw(min(batch, tasks - drawn))
        errors = (predict(stack, tokens, stream.counts) - answers).double().square()
        x, y = tokens[:, :, :-1, :-1], tokens[:, :, :-1, -1]
        gradient = ((w.unsqueeze(1) * y).unsqueeze(2) @ x).squeeze(2)  # (M, B, d)
        formula = ((tokens[:, :, -1, :-1] @ W) * gradient).sum(-1)
        sums += torch.stack([errors, errors.square(), (formula - answers).double().square()]).sum(2)
        drawn += answers.shape[1]
    mean, square, formula = sums / drawn
    return mean.tolist(), ((square - mean**2).clamp(min=0) / drawn).sqrt().tolist(), formula.tolist()


@torch.no_grad()
def learnt_steps(stack: nn.Module, stream: TaskStream) -> Tensor:
    """``W w_i`` in the models' answers, ``(M, n, d, d)``: the coefficient of ``x_a x_ib y_i`` in ``f``, for each i.

    A single example ``(+-e_b, +-1)`` is put at place i and the query is ``e_a``; the part of the answer that is odd in
    both signs is the coefficient. This does not depend on how a model factorises W.
    """
    M, d, T = len(stream.cells), stream.width - 1, stream.most + 1
    device = stream.counts.device
    unit = torch.eye(d, device=device)
    signs = torch.tensor([(1.0, 1.0), (1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0)], device=device)
    found = torch.empty(M, T - 1, d, d, device=device)
    for place in range(T - 1):
        tokens = torch.zeros(4, d, d, T, d + 1, device=device)  # signs, a, b
        tokens[..., -1, :-1] = unit.unsqueeze(1)
        tokens[..., place, :-1] = signs[:, :1, None, None] * unit
        tokens[..., place, -1] = signs[:, 1:, None]
        answers = predict(stack, tokens.flatten(0, 2).expand(M, -1, -1, -1), stream.counts).view(M, 4, d, d)
        found[:, place] = (answers * signs.prod(1)[:, None, None]).sum(1) / 4
    return found


def step_errors(steps: Tensor, optima: Sequence[Optimum]) -> list[float]:
    """Relative distances ``|W w - W* w*|_F / |W* w*|_F`` over all examples of a model."""
    errors = []
    for own, optimum in zip(steps.double().cpu(), optima, strict=True):
        wanted = optimum.weights[:, None, None] * optimum.preconditioner
        errors.append(((own[len(own) - len(optimum.weights) :] - wanted).norm() / wanted.norm()).item())
    return errors


def _predictors(optima: Sequence[Optimum], stream: TaskStream) -> tuple[Tensor, Tensor]:
    """W ``(M, d, d)`` and w ``(M, n)`` of the optima, with zeros where tokens are padding."""
    w = torch.zeros(len(optima), stream.most, dtype=torch.float64)
    for row, optimum in zip(w, optima, strict=True):
        row[stream.most - len(optimum.weights) :] = optimum.weights
    W = torch.stack([optimum.preconditioner for optimum in optima])
    return W.float().to(stream.counts.device), w.float().to(stream.counts.device)
