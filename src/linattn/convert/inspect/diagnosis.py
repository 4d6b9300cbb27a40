"""Diagnosis of a pretrained model: its attention, layer by layer, and which candidates could replace it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linattn.analysis.entropy import entropy
from linattn.convert.adapters import find_adapter
from linattn.convert.adapters.base import Site
from linattn.convert.degrees.allocate import split_cost
from linattn.convert.degrees.kernel import kernel_degrees
from linattn.convert.degrees.observe import Reservoir, watch
from linattn.convert.inspect.fit import CANDIDATES, Fitter, choose
from linattn.convert.layer.attention import Observation
from linattn.convert.plan import LayerShape
from linattn.convert.training.loop import Batch, Batches
from linattn.support.config import Config, option
from linattn.support.progress import Report

SINKS = 4  # first tokens, which many models attend to when nothing else matters
DRAWS = 2


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Config):
    """Options of a diagnosis."""

    window: int = option(64, "Tokens that count as near.", least=1)
    steps: int = option(20, "Steps that each candidate is trained for; 0: compared as it starts.", least=0)
    lr: float = option(1e-2, "Highest learning rate of these.", above=0)
    candidates: tuple[str, ...] | None = option(
        None, "Candidates to take softmax's place, with commas.", choices=CANDIDATES, default_text="all that suit"
    )
    tolerance: float = option(
        2**-8, "Tolerance of the degrees of freedom, in units of the largest eigenvalue; a smaller one counts more of "
        "them.", above=0,
    )  # fmt: skip
    points: int = option(512, "Queries and keys that these are measured on.", least=8)
    cost: int | None = option(None, "Mean dimension that layers share.", least=1, default_text="the head's")
    seed: int = option(0, "Seed of the draws.", least=0)


def inspect(
    model: nn.Module,
    batches: Batches,
    held_out: Sequence[Batch],
    options: InspectOptions | None = None,
    *,
    progress: Report | None = None,
) -> list[dict[str, Any]]:
    """Diagnose every layer that could be converted; the model itself does not change.

    Args:
        batches: training batches by the number of the step, which candidates are trained on.
        held_out: batches that figures and errors are measured on.
        progress: called with batches done, batches in all, and words.

    Returns:
        For each layer its number ``layer``; the figures of :meth:`Statistics.figures`; ``fits``, what each candidate
        misses and how large its state is; the ``choice`` among them; and the ``dimension`` that it gets of the budget.
    """
    options = options or InspectOptions()
    shapes = {site.layer_idx: site.shape for site in convertible_sites(model)}
    fitter = Fitter(
        shapes, options.candidates, window=options.window, lr=options.lr, steps=options.steps, seed=options.seed,
        device=next(model.parameters()).device,
    )  # fmt: skip
    statistics = {index: Statistics(shape, options.window, options.points, options.seed)
                  for index, shape in shapes.items()}  # fmt: skip

    def measure(seen: Observation) -> None:
        fitter.measure(seen)
        statistics[seen.layer_idx].add(seen)

    for step in range(options.steps):
        watch(model, [batches(step)], partial(fitter.learn, step=step))
        if progress is not None:
            progress(step + 1, options.steps + len(held_out), "candidates learn")
    for i, batch in enumerate(held_out):
        watch(model, [batch], measure)
        if progress is not None:
            progress(options.steps + i + 1, options.steps + len(held_out), "layers are measured")
    figures = {index: each.figures(options.tolerance) for index, each in statistics.items()}
    degrees = {index: max(each["degrees_of_freedom"]) for index, each in figures.items()}
    dims = split_cost(degrees, options.cost or next(iter(shapes.values())).head_dim)
    rows = []
    for index in shapes:
        fits = fitter.fits(index)
        row = {"layer": index, **figures[index], "fits": fits, "choice": choose(fits)["name"], "dimension": dims[index]}
        rows.append(row)
    return rows


def convertible_sites(model: nn.Module) -> list[Site]:
    """The attention layers that could be converted; raises if there are none."""
    sites = find_adapter(model).sites(model)
    if not any(site.convertible for site in sites):
        reasons = {str(site.why_not) for site in sites}
        raise ValueError(f"no layer of {type(model).__name__} can be converted: {'; '.join(sorted(reasons))}")
    return [site for site in sites if site.convertible]


class Statistics:
    """How sharp one layer's softmax attention is, how far it looks, and how many features it takes."""

    def __init__(self, shape: LayerShape, window: int, points: int, seed: int) -> None:
        self.shape, self.window = shape, window
        self.points = Reservoir(DRAWS * points, seed)
        self.rows = 0
        self.even = 0.0
        self.sums = torch.zeros(3, shape.num_heads, dtype=torch.float64)  # entropy, far, sinks
        self.q_norms = torch.zeros(3, shape.num_heads, dtype=torch.float64)  # count, sum, sum of squares
        self.k_norms = torch.zeros(3, shape.num_kv_heads, dtype=torch.float64)

    @torch.no_grad()
    def add(self, seen: Observation) -> None:
        self.points.add(seen.q, seen.k, seen.key_mask)
        for b in range(len(seen.q)):  # one sequence at a time: each head's map has T^2 numbers
            real = slice(None) if seen.key_mask is None else seen.key_mask[b]
            q, k = seen.q[b][:, real].float(), seen.k[b][:, real].float()
            for sums, x in ((self.q_norms, q), (self.k_norms, k)):
                norms = torch.linalg.vector_norm(x, dim=-1).double().cpu()
                sums += torch.stack([torch.full((len(x),), float(x.shape[1])), norms.sum(-1), norms.square().sum(-1)])
            self._weights(q, k)

    def _weights(self, q: Tensor, k: Tensor) -> None:
        T, D = q.shape[1:]
        k = k.repeat_interleave(len(q) // len(k), 0)
        here, there = torch.arange(T, device=q.device)[:, None], torch.arange(T, device=q.device)[None]
        visible = here >= there if self.shape.causal else torch.ones(T, T, dtype=torch.bool, device=q.device)
        weights = (q @ k.mT * D**-0.5).masked_fill(~visible, float("-inf")).softmax(-1)
        distant = (here - there).abs() >= self.window
        sinks = distant & (there < SINKS) if self.shape.causal else torch.zeros_like(distant)
        parts = [entropy(weights), (weights * (distant & ~sinks)).sum(-1), (weights * sinks).sum(-1)]
        self.sums += torch.stack([part.sum(-1) for part in parts]).double().cpu()
        self.even += float(visible.sum(-1).double().log().sum())
        self.rows += T

    def figures(self, tolerance: float) -> dict[str, Any]:
        """One number per query head, as means over queries; ``k_norm`` and ``degrees_of_freedom``: one per key head.

        ``entropy`` of the rows of weights, in nats; ``even_entropy``, of rows that weigh all their keys alike;
        ``q_norm`` and ``k_norm``, lengths of queries and keys (logits are ``q . k / sqrt(D)``), and ``..._spread``,
        their standard deviation in units of the mean; ``far``, the weight on keys that are further away than the
        window, without the sinks (causal; else further on both sides); ``sinks``, the weight on the first four tokens,
        where they are outside of the window; ``degrees_of_freedom`` of the kernel ``exp(q . k / sqrt(D))``.
        """
        entropies, far, sinks = (self.sums / self.rows).tolist()
        degrees = torch.stack([kernel_degrees(draw, tolerance) for draw in self.points.draws(DRAWS)]).mean(0)
        (q, q_spread), (k, k_spread) = _moments(self.q_norms), _moments(self.k_norms)
        return {
            "entropy": entropies, "even_entropy": self.even / self.rows, "q_norm": q, "k_norm": k,
            "q_norm_spread": q_spread, "k_norm_spread": k_spread, "far": far, "sinks": sinks,
            "degrees_of_freedom": degrees.tolist(),
        }  # fmt: skip


def _moments(sums: Tensor) -> tuple[list[float], list[float]]:
    """Mean, and standard deviation in units of the mean."""
    count, total, squares = sums
    mean = total / count
    spread = (squares / count - mean.square()).clamp(min=0).sqrt() / mean.clamp(min=1e-30)
    return mean.tolist(), spread.tolist()
