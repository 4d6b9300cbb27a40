"""Figures of one layer's softmax attention: how sharp it is, how far it looks, how many features it takes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.analysis.entropy import entropy
from linattn.convert.degrees.gram import kernel_degrees
from linattn.convert.degrees.points import Reservoir
from linattn.convert.layer.attention import Observation
from linattn.convert.plan import LayerShape

SINKS = 4  # first tokens, which many models attend to when nothing else matters
DRAWS = 2


@dataclass(frozen=True)
class LayerFigures:
    """One number per query head, as means over queries; for ``k_norm`` and ``degrees_of_freedom`` one per key head.

    Attributes:
        entropy: entropy of the rows of weights, in nats.
        even_entropy: entropy of rows that weigh all their keys alike, for comparison.
        q_norm, k_norm: lengths of queries and keys, whose logits are ``q . k / sqrt(D)``.
        q_norm_spread, k_norm_spread: standard deviation of the lengths, in units of their mean.
        far: weight on keys that are further away than the window, without the sinks (causal; else further on both
            sides).
        sinks: weight on the first four tokens, where they are outside of the window.
        degrees_of_freedom: of the kernel ``exp(q . k / sqrt(D))`` on queries and keys.
    """

    entropy: list[float]
    even_entropy: float
    q_norm: list[float]
    k_norm: list[float]
    q_norm_spread: list[float]
    k_norm_spread: list[float]
    far: list[float]
    sinks: list[float]
    degrees_of_freedom: list[float]


class Statistics:
    """Sums over the observations of one layer."""

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
            self._norms(self.q_norms, q)
            self._norms(self.k_norms, k)
            self._weights(q, k)

    @staticmethod
    def _norms(sums: Tensor, x: Tensor) -> None:
        norms = torch.linalg.vector_norm(x, dim=-1).double().cpu()
        sums += torch.stack([torch.full((len(x),), float(x.shape[1])), norms.sum(-1), norms.square().sum(-1)])

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

    def figures(self, tolerance: float) -> LayerFigures:
        means = (self.sums / self.rows).tolist()
        degrees = torch.stack([kernel_degrees(draw, tolerance) for draw in self.points.draws(DRAWS)]).mean(0)
        (q, q_spread), (k, k_spread) = _moments(self.q_norms), _moments(self.k_norms)
        return LayerFigures(means[0], self.even / self.rows, q, k, q_spread, k_spread, means[1], means[2],
                            degrees.tolist())  # fmt: skip


def _moments(sums: Tensor) -> tuple[list[float], list[float]]:
    """Mean, and standard deviation in units of the mean."""
    count, total, squares = sums
    mean = total / count
    spread = (squares / count - mean.square()).clamp(min=0).sqrt() / mean.clamp(min=1e-30)
    return mean.tolist(), spread.tolist()
