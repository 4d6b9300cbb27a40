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
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Generator, Tensor

from linattn.convert.convert import Observation
from linattn.convert.degrees.kernel import (
    LeverageDensity,
    PositiveFeatures,
    log_estimate,
    normal_features,
    scaled,
    spectrum,
)
from linattn.convert.degrees.measure import Reservoir, watch
from linattn.lab.cases import Work
from linattn.lab.experiment import Experiment
from linattn.lab.kept import Case
from linattn.support.config import option
from linattn.support.extras import need
from linattn.support.options import OptionError

if TYPE_CHECKING:
    from pandas import DataFrame

    from linattn.lab.page import Section

USUAL: dict[str, Any] = {"counts": (16, 32, 64, 128, 256, 512, 1024), "seeds": 5, "points": 384, "heads": 4, "dim": 32}
QUICK: dict[str, Any] = {"counts": (16, 64), "seeds": 2, "points": 48, "heads": 1, "dim": 8}
LARGE: dict[str, Any] = USUAL | {"counts": (*USUAL["counts"], 2048, 4096), "seeds": 10, "points": 1024, "heads": 12}
FILES = (".npz", ".pt", ".safetensors")
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


def usual(name: str) -> str:
    """The defaults of an option, in words."""
    words = [",".join(map(str, made[name])) if name == "counts" else str(made[name]) for made in (USUAL, QUICK, LARGE)]
    return f"{words[0]}, with --quick {words[1]}, with --large {words[2]}"


@dataclass(frozen=True, kw_only=True)
class Dof(Experiment):
    """Random features of the attention kernel, drawn from N(0, I) and by leverage scores.

    The error of the kernel and of attention-weighted sums against the number of features, with the bound that the
    degrees of freedom of the activations give. Runs on the CPU, in fp64.

    Exit code: 0 all right, 1 the bound failed more often than it may, 2 a bad option or a package that is missing.
    """

    name: ClassVar[str] = "lab-dof"
    device: str = option("cpu", hidden=True)
    quick: bool = option(False, "Small: shows in seconds that everything runs.")
    large: bool = option(False, "More heads, points, seeds and features.")
    counts: tuple[int, ...] = option((), "Numbers of features.", least=1, default_text=usual("counts"))
    seeds: int | None = option(None, "Draws of the features for each number.", least=2, default_text=usual("seeds"))
    points: int | None = option(
        None, "Queries and keys that the kernel is looked at on.", least=8, default_text=usual("points")
    )
    tolerance: float = option(
        2**-4, "Tolerance of the degrees of freedom, in units of the kernel's largest eigenvalue.", above=0
    )
    heads: int | None = option(None, "Heads looked at of each source.", least=1, default_text=usual("heads"))
    dim: int | None = option(None, "Width of random activations.", least=1, default_text=usual("dim"))
    norm: float = option(1.5, "Size of random activations: the mean of |x|^2 / sqrt(dim).", above=0)
    activations: Path | None = option(
        None, "Real ones: a file with q and k (.npz, .pt, .safetensors), or a folder of a language model."
    )
    text: Path | None = option(None, "File that the model reads.", default_text="what it writes itself")
    delta: float = option(0.05, "The bound holds with probability 1 - 2 delta.", above=0, below=0.5)
    seed: int = option(0, "Seed of activations and features.", least=0)

    def check(self) -> None:
        if self.quick and self.large:
            raise OptionError("large", "cannot be given together with --quick")
        if len(set(self.chosen("counts"))) < 2:
            raise OptionError("counts", f"must be at least two different numbers, got {self.counts}")
        real = self.activations
        if real is not None and not ((real.is_file() and real.suffix in FILES) or (real / "config.json").is_file()):
            raise OptionError(
                "activations", f"must be a file ({', '.join(FILES)}) or a model's folder with config.json, got {real}"
            )
        if self.text is not None and not self.text.is_file():
            raise OptionError("text", f"must be a file, got {self.text}")

    def chosen(self, name: str) -> Any:
        """The value of an option, by ``quick`` or ``large`` where it was not given."""
        return getattr(self, name) or (QUICK if self.quick else LARGE if self.large else USUAL)[name]

    def cases(self) -> list[dict[str, Any]]:
        names = ("seeds", "points", "heads", "tolerance", "delta", "seed")
        shared = {name: self.chosen(name) if name in USUAL else getattr(self, name) for name in names}
        shared["counts"] = sorted(set(self.chosen("counts")))
        sources = {"random": {"dim": self.chosen("dim"), "norm": self.norm}}
        if self.activations is not None:
            text = None if self.text is None else str(self.text)
            sources[self.activations.stem] = {"activations": str(self.activations), "text": text}
        return [{"source": source, "head": head, "config": shared | own} for source, own in sources.items()
                for head in range(shared["heads"])]  # fmt: skip

    def title(self, case: Case) -> str:
        return f"{case['source']}, head {case['head'] + 1} of {case['config']['heads']}"

    @staticmethod
    def measure(case: Case, work: Work) -> dict[str, Any]:
        """``rows`` of all samplings and numbers of features on one head; none where a source has fewer heads."""
        config = case["config"]
        name, points = head_of(config, case["head"])
        if points is None:
            return {"rows": []}
        y = scaled(points.double())
        scores, eigenvalues = y @ y.mT, spectrum(points).values
        density = LeverageDensity(points, config["tolerance"])
        rows: list[dict[str, Any]] = []
        for sampling in SAMPLINGS:
            for count in config["counts"]:
                work.tell(len(rows) / (len(SAMPLINGS) * len(config["counts"])), f"{SAMPLINGS[sampling]}, M = {count}")
                errors, by_leverage = [], sampling == "leverage"
                for seed in range(config["seeds"]):
                    draw, dim = Generator().manual_seed(1_000_003 * config["seed"] + 10_007 * seed + count), y.shape[-1]
                    drawn = density.draw(count, draw) if by_leverage else normal_features(1, count, dim, draw)
                    errors.append(errors_of(y, scores, drawn))
                t = deviation(density.limit, count, config["tolerance"], config["delta"])
                bounds = error_bounds(eigenvalues, t, config["tolerance"], config["delta"])
                row: dict[str, Any] = dict(
                    zip([f"{name}_error" for name in ERRORS], map(list, zip(*errors, strict=True)), strict=True)
                )
                row |= {f"{name}_bound": b if by_leverage else None for name, b in zip(ERRORS, bounds, strict=False)}
                rows.append({"head": name, "sampling": sampling, "count": count, "degrees": density.degrees, **row})
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
        return (
            [] if right >= least else [f"the bound holds for {right} of {checked} errors, at least {least:g} expected"]
        )

    def table(self, rows: Sequence[Row]) -> tuple[list[str], list[list[object]]]:
        shown: list[list[object]] = []
        for source, count in dict.fromkeys((row["source"], row["count"]) for row in rows):
            alike = [row for row in rows if (row["source"], row["count"]) == (source, count)]
            ends = [curve(alike, sampling, name)[0] for name in ERRORS for sampling in SAMPLINGS]
            shown.append([source, count, *(f"{mean:.2g} ({low:.2g}, {high:.2g})" for _, mean, low, high in ends)])
        return ["source", "features", *(f"{name}, {words}" for name in ERRORS for words in SAMPLINGS.values())], shown

    def figures(self, frame: "DataFrame", meta: Row) -> "list[Section]":
        import pandas

        from linattn.lab.page import Section

        rows = frame.to_dict("records")
        charts = [
            chart_of([row for row in rows if row["source"] == source], source) for source in sorted(set(frame.source))
        ]
        parts = [Section(each.title, chart=each) for each in charts]
        names = ("source", "head", "sampling", "count", "degrees", "kernel_bound", "sum_bound")
        means = [{f"{name} error": fmean(row[f"{name}_error"]) for name in ERRORS} for row in rows]
        errors = [{name: row[name] for name in names} | mean for row, mean in zip(rows, means, strict=True)]
        reading = "Means over seeds of each head; a bound is of leverage scores alone."
        return [*parts, Section("Errors, head by head", reading, pandas.DataFrame(errors))]


def errors_of(y: Tensor, scores: Tensor, features: PositiveFeatures) -> tuple[float, float, float]:
    """``|K^ - K|_HS / |K|_HS``, ``|K^ - K|_op / |K|_op``, and the mean total variation between rows of attention."""
    logs = log_estimate(y[None], y[None], features)[0]
    kernel = (scores - scores.max()).exp()
    difference = (logs - scores.max()).exp() - kernel
    rows = (logs.softmax(-1) - scores.softmax(-1)).abs().sum(-1).mean() / 2
    worst = torch.linalg.eigvalsh(difference).abs().max() / torch.linalg.eigvalsh(kernel).max()
    return float(difference.norm() / kernel.norm()), float(worst), float(rows)


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
    layers = activations_of(config)
    heads = [(f"layer {layer}, head {number}", points) for layer, sample in sorted(layers.items())
             for number, points in enumerate(sample.points())]  # fmt: skip
    count = min(config["heads"], len(heads))  # spread over the layers
    return heads[(2 * head + 1) * len(heads) // (2 * count)] if head < count else ("", None)


def activations_of(config: Row) -> dict[int, Reservoir]:
    """A sample of queries and keys for each layer of a file or of a model."""
    path, samples = Path(config["activations"]), dict[int, Reservoir]()
    if path.is_dir():
        need("a pretrained model", "transformers", "safetensors")
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        batches: Any = _tokens(model, config).split(4)

        def see(seen: Observation) -> None:
            sample = samples.setdefault(seen.layer_idx, Reservoir(config["points"], config["seed"]))
            sample.add(seen.q, seen.k, seen.key_mask)

        watch(model, batches, see)
        return samples
    arrays = _arrays(path)
    if not {"q", "k"} <= arrays.keys() or any(arrays[name].dim() != 4 for name in "qk"):
        raise OptionError("activations", f"must hold q (B, H, T, D) and k (B, H_kv, T, D), {path} has {sorted(arrays)}")
    samples[0] = Reservoir(config["points"], config["seed"])
    try:
        samples[0].add(arrays["q"].float(), arrays["k"].float())
    except ValueError as error:
        raise OptionError("activations", str(error)) from error
    return samples


def _arrays(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        need("a safetensors file", "safetensors")
        from safetensors.torch import load_file

        return dict(load_file(path))
    if path.suffix == ".npz":
        import numpy as np

        with np.load(path) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    return dict(torch.load(path, weights_only=True))


def _tokens(model: Any, config: Row) -> Tensor:
    length = min(LENGTH, int(getattr(model.config, "max_position_embeddings", LENGTH)))
    if config["text"] is None:
        torch.manual_seed(config["seed"])
        first = torch.full((SEQUENCES, 1), model.config.bos_token_id or 0)
        options = {"do_sample": True, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": length - 1}
        tokens: Tensor = model.generate(first, attention_mask=torch.ones_like(first), **options)
        return tokens
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(config["activations"])
    ids = torch.tensor(tokenizer(Path(config["text"]).read_text(encoding="utf-8"), verbose=False)["input_ids"])
    rows = min(len(ids) // length, SEQUENCES)
    if not rows:
        raise OptionError("text", f"must have at least {length} tokens, {config['text']} has {len(ids)}")
    return ids[: rows * length].view(rows, length)


def within(rows: Sequence[Row]) -> tuple[int, int]:
    """How many errors lie within their bound, and how many have a bound."""
    checked = [error <= row[f"{name}_bound"] for row in rows if row["sampling"] == "leverage"
               for name in ("kernel", "sum") for error in row[f"{name}_error"]]  # fmt: skip
    return sum(checked), len(checked)


def curve(rows: Sequence[Row], sampling: str, name: str) -> list[tuple[int, float, float, float]]:
    """For each number of features: geometric mean, lowest and highest error over heads and seeds."""
    points = []
    for count in sorted({row["count"] for row in rows}):
        alike = [row for row in rows if (row["sampling"], row["count"]) == (sampling, count)]
        errors = [error for row in alike for error in row[f"{name}_error"]]
        points.append((count, math.exp(fmean(map(math.log, errors))), min(errors), max(errors)))
    return points


def chart_of(rows: Sequence[Row], source: str) -> Any:
    """Errors of one source against the number of features, with the largest bound over all heads."""
    from linattn.lab.convert.curves import chart

    panels: list[Any] = []
    for name, title in ERRORS.items():
        curves: dict[str, list[tuple[float, float]]] = {
            words: [(count, error) for count, error, _, _ in curve(rows, sampling, name)]
            for sampling, words in SAMPLINGS.items()
        }
        bounds: dict[float, float] = {}
        for row in rows:
            if row["sampling"] == "leverage" and name != "row":
                bounds[row["count"]] = max(bounds.get(row["count"], 0.0), row[f"{name}_bound"])
        curves[f"{SAMPLINGS['leverage']}+bound"] = sorted(bounds.items())
        panels.append((title, "features M", curves, {"log": None if name == "row" else 10}))
    return chart(f"dof-{source}", f"Activations: {source}", READING, *panels)
