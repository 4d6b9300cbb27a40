"""Search for the space that suits a graph: the signature (q, p) whose curvature is nearest to the graph's."""

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from linattn.lab.tasks.graph.curvature import PAIRS, REFERENCES, sectional_curvature
from linattn.lab.tasks.graph.data import GraphData

FLAT = 0.1  # mean curvatures up to this size count as flat
NARROW, WIDE = 0.5, 5.0  # least and greatest spread of a space's curvature, in units of the mean


@dataclass(frozen=True)
class Signature:
    """``q`` time and ``p`` space dimensions, and what they were chosen by; q > p is spherical, q < p hyperbolic."""

    q: int
    p: int
    mean: float
    std: float
    curvature: Tensor
    """Curvature at each node with two neighbours or more."""

    @property
    def kind(self) -> str:
        return "flat" if self.q == self.p else "spherical" if self.q > self.p else "hyperbolic"


def search_signature(
    data: GraphData, *, dimension: int = 16, references: int = REFERENCES, pairs: int = PAIRS, seed: int = 0
) -> Signature:
    """Fit a normal distribution to the curvature at all nodes; find the nearest space with q + p = ``dimension``.

    Args:
        data: anything with ``edge_index`` (both directions of each edge) and ``num_nodes``.
        dimension: q + p, even.
        references, pairs, seed: as for :func:`sectional_curvature`.

    Example:
        >>> from linattn.lab.tasks.graph import cycle, search_signature, tree
        >>> [(found.q, found.p) for found in map(search_signature, (tree(4, 5), cycle(8), cycle(100)))]
        [(0, 16), (16, 0), (8, 8)]
    """
    assert data.num_nodes is not None
    found = sectional_curvature(data.edge_index, data.num_nodes, references=references, pairs=pairs, seed=seed)
    if not len(found):
        raise ValueError("curvature needs a node with two neighbours or more, and there is none")
    exact = found.double()
    mean, std = float(exact.mean()), float(exact.std(unbiased=False))
    return Signature(*nearest_signature(mean, std, dimension), mean, std, found)


def nearest_signature(mean: float, std: float, dimension: int = 16) -> tuple[int, int]:
    """The (q, p) whose normal distribution is nearest to ``N(mean, std^2)``.

    A mean of at most 0.1 in size is flat: q = p. Otherwise the spaces with the sign of the mean compete. Their spread s
    goes from ``5 |mean|``, next to the flat space, down to ``|mean| / 2`` at the pure sphere (p = 0) or hyperboloid
    (q = 0), and the least ``KL(N(mean, std^2) || N(mean, s^2)) = ln(s / std) + std^2 / (2 s^2) - 1/2`` wins. ``ln std``
    is the same for all and is left out, so that std = 0 is no special case.

    Example:
        >>> nearest_signature(-0.6, 0.1), nearest_signature(0.05, 1.0), nearest_signature(0.5, 1.0)
        ((0, 16), (8, 8), (14, 2))
    """
    if dimension < 4 or dimension % 2:
        raise ValueError(f"dimension must be even and at least 4, got {dimension}")
    half = dimension // 2
    if abs(mean) <= FLAT:
        return half, half
    spreads = torch.linspace(NARROW, WIDE, half, dtype=torch.float64) * abs(mean)
    divergence = [log(s) + std**2 / (2 * s**2) for s in spreads.tolist()]
    smaller = min(range(half), key=divergence.__getitem__)
    return (dimension - smaller, smaller) if mean > 0 else (smaller, dimension - smaller)


def histogram(values: Tensor, width: int = 40, bins: int = 15) -> list[str]:
    """A histogram as lines of text: the middle of each bin, a bar, and the count."""
    low, high = float(values.min()), float(values.max())
    if high - low < 1e-6:
        low, high = low - 0.5, high + 0.5
        bins = 1
    counts = values.double().histc(bins, low, high).long().tolist()
    step, most = (high - low) / bins, max(counts)
    bars = ["█" * round(width * count / most) or ("▏" if count else "") for count in counts]
    middles = [low + (i + 0.5) * step for i in range(bins)]
    return [f"{m:+8.3f}  {bar:<{width}}  {count:,}" for m, bar, count in zip(middles, bars, counts, strict=True)]
