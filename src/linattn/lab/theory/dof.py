"""``linattn lab dof``: how well random features approximate the kernel of softmax attention, and a bound on it.

On J points the kernel is ``Sigma = [K(x_i, x_j)] / J`` and its estimate with M features ``Sigma^``. Let N be the
degrees of freedom at tolerance lambda. ``(Sigma + lambda)^{-1/2} Sigma^ (Sigma + lambda)^{-1/2}`` is a mean of M
independent matrices of rank one, each of norm at most N where z is drawn by leverage scores (by N(0, I) there is no
such limit).
Bernstein's inequality for matrices (Tropp, arXiv 1501.01571, theorem 7.7.1) gives with probability 1 - delta

    -t (Sigma + lambda) <= Sigma^ - Sigma <= t (Sigma + lambda),   t^2 / 2 = (p + t / 3) (N / M) log(8 N / (p delta))

with ``p = s_1 / (s_1 + lambda)``, from which the two statements of arXiv 2507.03340 follow:

- ``|K - K^|_{L2(rho x rho)} = |Sigma^ - Sigma|_HS`` is at most ``t |Sigma + lambda|_HS``; and, as the trace of Sigma^
  is at most ``1 / delta`` times its mean with probability 1 - delta, its square at most
  ``t (s_1 + lambda) tr(Sigma) (1 + 1 / delta)``;
- a sum weighted by attention, ``sum_i K(x_i, .) v_i / J``, has the error ``|Sigma^ - Sigma|_op |v|`` for the worst v,
  which is at most ``t (s_1 + lambda) |v|``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor

from linattn.convert.convert import Observation
from linattn.convert.degrees import kernel
from linattn.convert.degrees.kernel import LeverageDensity, PositiveFeatures
from linattn.convert.degrees.measure import Reservoir, watch
from linattn.lab.cases import Case, Work
from linattn.lab.convert.curves import Curves, chart
from linattn.lab.convert.folder import load, load_tokenizer, named
from linattn.lab.page import Section
from linattn.lab.theory.laboratory import Laboratory, sized
from linattn.support.config import option
from linattn.support.extras import need
from linattn.support.options import OptionError

if TYPE_CHECKING:
    from pandas import DataFrame

SEQUENCES, LENGTH = 16, 256  # what a model reads
SAMPLINGS = {"normal": "z ~ N(0, I)", "leverage": "leverage scores"}
ERRORS = {
    "kernel": "Error of the kernel, relative",
    "sum": "Error of the worst attention-weighted sum, relative",
    "row": "Total variation of attention rows",
}
READING = (
    "Geometric means over heads and seeds. Dashed: the bound for leverage scores, which holds with the probability of "
    "the settings. For z ~ N(0, I) the theory has none: its leverage scores have no largest one. An error of 1 is that "
    "of estimating zero. Rows are those of the estimated kernel divided by their sums; of them the theory says nothing."
)

Row = Mapping[str, Any]
"""One head, sampling and number of features: the errors of each seed, and their bounds, None where there is none."""


@dataclass(frozen=True, kw_only=True)
class Dof(Laboratory):
    """Random features of the attention kernel, drawn from N(0, I) and by leverage scores.

    The error of the kernel and of attention-weighted sums against the number of features, with the bound that the
    degrees of freedom of the activations give. Runs on the CPU, in fp64.

    Exit code: 0 all right, 1 the bound failed more often than it may, 2 a bad option or a package that is missing.
    """

    name = "lab-dof"
    device: str = option("cpu", hidden=True)
    counts: tuple[int, ...] = sized((16, 32, 64, 128, 256, 512, 1024), (16, 64), "Numbers of features.", least=1)
    seeds: int = sized(5, 2, "Draws of the features for each number.", least=2)
    points: int = sized(384, 48, "Queries and keys that the kernel is looked at on.", least=8)
    tolerance: float = option(
        2**-4, "Tolerance of the degrees of freedom, in units of the kernel's largest eigenvalue.", above=0
    )
    heads: int = sized(4, 1, "Heads looked at of each source.", least=1)
    dim: int = sized(32, 8, "Width of random activations.", least=1)
    norm: float = option(1.5, "Size of random activations: the mean of |x|^2 / sqrt(dim).", above=0)
    activations: Path | None = option(None, "Real ones: folder of a language model that reads --text.")
    text: Path | None = option(None, "File that the model reads.")
    delta: float = option(0.05, "The bound holds with probability 1 - 2 delta.", above=0, below=0.5)
    seed: int = option(0, "Seed of activations and features.", least=0)

    def check(self) -> None:
        if len(set(self.counts)) < 2:
            raise OptionError("counts", f"must be at least two different numbers, got {self.counts}")
        if self.activations is not None and (self.text is None or not self.text.is_file()):
            raise OptionError("text", f"must be a file for the model to read, got {self.text}")

    def cases(self) -> list[dict[str, Any]]:
        names = ("seeds", "points", "heads", "tolerance", "delta", "seed")
        shared = {name: getattr(self, name) for name in names} | {"counts": sorted(set(self.counts))}
        sources: dict[str, dict[str, Any]] = {"random": {"dim": self.dim, "norm": self.norm}}
        if self.activations is not None:
            sources[self.activations.stem] = {"activations": str(self.activations), "text": str(self.text)}
        return [{"source": source, "head": head, "config": shared | own} for source, own in sources.items()
                for head in range(self.heads)]  # fmt: skip

    @staticmethod
    def measure(case: Case, work: Work) -> dict[str, Any]:
        """``rows`` of all samplings and numbers of features on one head; none where a source has fewer heads."""
        config = case["config"]
        name, points = head_of(config, case["head"])
        rows: list[dict[str, Any]] = []
        if points is None:
            return {"rows": rows}
        y, tolerance, delta = kernel.scaled(points.double()), config["tolerance"], config["delta"]
        scores, eigenvalues, density = y @ y.mT, kernel.spectrum(points).values, LeverageDensity(points, tolerance)
        drawn_from = list(product(SAMPLINGS, config["counts"]))
        for sampling, count in drawn_from:
            work.tell(len(rows) / len(drawn_from), f"{SAMPLINGS[sampling]}, M = {count}")
            errors, by_leverage, dim = [], sampling == "leverage", y.shape[-1]
            for seed in range(config["seeds"]):
                draw = Generator().manual_seed(1_000_003 * config["seed"] + 10_007 * seed + count)
                drawn = density.draw(count, draw) if by_leverage else kernel.normal_features(1, count, dim, draw)
                errors.append(errors_of(y, scores, drawn))
            row = {"head": name, "sampling": sampling, "count": count, "degrees": density.degrees}
            row |= {f"{error}_error": list(own) for error, own in zip(ERRORS, zip(*errors, strict=True), strict=True)}
            bounds = error_bounds(eigenvalues, deviation(density.limit, count, tolerance, delta), tolerance, delta)
            row |= dict(zip(("kernel_bound", "sum_bound"), bounds if by_leverage else (None, None), strict=True))
            rows.append(row)
        return {"rows": rows}

    def sentences(self, rows: Sequence[Row]) -> list[str]:
        words = []
        for source in dict.fromkeys(row["source"] for row in rows):
            own = [row for row in rows if row["source"] == source]
            errors = [f"{curve(own, sampling, 'kernel')[-1][1]:.2g} by {name}" for sampling, name in SAMPLINGS.items()]
            degrees, most = [row["degrees"] for row in own], max(row["count"] for row in own)
            between = f"{min(degrees):.1f} to {max(degrees):.1f} degrees of freedom"
            left = f"{most} features leave a kernel error of {' and '.join(errors)}"
            words.append(f"On {source} activations ({between}) {left}.")
        right, checked = within(rows)
        return [*words, f"{right} of {checked} errors lie within the bound."]

    def wrong(self, rows: Sequence[Row]) -> list[str]:
        right, checked = within(rows)
        least = (1 - 2 * self.delta) * checked
        words = f"the bound holds for {right} of {checked} errors, at least {least:g} expected"
        return [] if right >= least else [words]

    def table(self, rows: Sequence[Row]) -> tuple[list[str], list[list[object]]]:
        """Geometric means over heads and seeds."""
        shown: list[list[object]] = []
        for source, count in dict.fromkeys((row["source"], row["count"]) for row in rows):
            alike = [row for row in rows if (row["source"], row["count"]) == (source, count)]
            errors = [curve(alike, sampling, name)[0][1] for name in ERRORS for sampling in SAMPLINGS]
            shown.append([source, count, *(f"{error:.2g}" for error in errors)])
        return ["source", "features", *(f"{name}, {words}" for name in ERRORS for words in SAMPLINGS.values())], shown

    def figures(self, frame: "DataFrame", meta: Row) -> list[Section]:
        """A chart for each source, with the largest bound over its heads."""
        found: list[Section] = []
        for source, own in frame.groupby("source"):
            panels: list[Any] = []
            for name, title in ERRORS.items():
                curves: Curves = {words: curve(own.to_dict("records"), by, name) for by, words in SAMPLINGS.items()}
                if name != "row":
                    largest = own[own.sampling == "leverage"].groupby("count")[f"{name}_bound"].max()
                    curves[f"{SAMPLINGS['leverage']}+bound"] = list(largest.items())
                panels.append((title, "features M", curves, {"log": None if name == "row" else 10}))
            found += chart(f"dof-{source}", f"Activations: {source}", READING, *panels)
        return found


def errors_of(y: Tensor, scores: Tensor, features: PositiveFeatures) -> tuple[float, float, float]:
    """``|K^ - K|_HS / |K|_HS``, ``|K^ - K|_op / |K|_op``, and the mean total variation between rows of attention."""
    logs = kernel.log_estimate(y[None], y[None], features)[0]
    exact = (scores - scores.max()).exp()
    difference = (logs - scores.max()).exp() - exact
    rows = (logs.softmax(-1) - scores.softmax(-1)).abs().sum(-1).mean() / 2
    worst = torch.linalg.eigvalsh(difference).abs().max() / torch.linalg.eigvalsh(exact).max()
    return float(difference.norm() / exact.norm()), float(worst), float(rows)


def deviation(degrees: float, count: int, tolerance: float, delta: float) -> float:
    """t of the inequality in this module's docstring; the tolerance is in units of the largest eigenvalue."""
    p = 1 / (1 + tolerance)
    a = degrees / count * math.log(8 * degrees / (p * delta))
    return a / 3 + math.sqrt(a * a / 9 + 2 * a * p)


def error_bounds(eigenvalues: Tensor, t: float, tolerance: float, delta: float) -> tuple[float, float]:
    """Bounds of the first two errors; ``eigenvalues (J,)`` are relative to the largest."""
    first = t * float((eigenvalues + tolerance).norm())
    second = math.sqrt(t * (1 + tolerance) * float(eigenvalues.sum()) * (1 + 1 / delta))
    return min(first, second) / float(eigenvalues.norm()), t * (1 + tolerance)


def head_of(config: Row, head: int) -> tuple[str, Tensor | None]:
    """The name and the points ``(J, D)``, queries and keys together, of a head; None where there are fewer heads."""
    if "activations" not in config:
        # Normal vectors whose channels have variances that fall as 1 / i, like those of trained heads.
        variance = 1 / torch.arange(1, config["dim"] + 1, dtype=torch.float64)
        variance *= config["norm"] * config["dim"] ** 0.5 / variance.sum()
        shape, generator = (config["heads"], config["points"], config["dim"]), Generator().manual_seed(config["seed"])
        return f"draw {head}", (torch.randn(shape, generator=generator, dtype=torch.float64) * variance.sqrt())[head]
    heads = [(f"layer {layer}, head {number}", points) for layer, sample in sorted(activations_of(config).items())
             for number, points in enumerate(sample.points())]  # fmt: skip
    count = min(config["heads"], len(heads))  # spread over the layers
    return heads[(2 * head + 1) * len(heads) // (2 * count)] if head < count else ("", None)


def activations_of(config: Row) -> dict[int, Reservoir]:
    """A sample of queries and keys for each layer of a model, which reads the beginning of a text."""
    folder, samples = Path(config["activations"]), dict[int, Reservoir]()

    def add(seen: Observation) -> None:
        sample = samples.setdefault(seen.layer_idx, Reservoir(config["points"], config["seed"]))
        sample.add(seen.q, seen.k, seen.key_mask)

    need("a pretrained model", "transformers", "safetensors")
    with named("activations"):
        model, tokenizer = load(folder, "cpu", "fp32"), load_tokenizer(folder)
    length = min(LENGTH, getattr(model.config, "max_position_embeddings", None) or LENGTH)
    ids = tokenizer.encode(Path(config["text"]).read_text(encoding="utf-8"), verbose=False)
    rows = min(SEQUENCES, len(ids) // length)
    if not rows:
        raise OptionError("text", f"must have {length} tokens, it has {len(ids)}")
    watch(model, torch.tensor(ids[: rows * length]).view(rows, length).split(4), add)
    return samples


def within(rows: Sequence[Row]) -> tuple[int, int]:
    """How many errors lie within their bound, and how many have a bound."""
    checked = [error <= row[f"{name}_bound"] for row in rows if row["sampling"] == "leverage"
               for name in ("kernel", "sum") for error in row[f"{name}_error"]]  # fmt: skip
    return sum(checked), len(checked)


def curve(rows: Sequence[Row], sampling: str, name: str) -> list[tuple[float, float]]:
    """For each number of features the geometric mean of an error over heads and seeds."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["sampling"] == sampling:
            found.setdefault(row["count"], []).extend(row[f"{name}_error"])
    return [(count, geometric_mean(errors)) for count, errors in sorted(found.items())]
