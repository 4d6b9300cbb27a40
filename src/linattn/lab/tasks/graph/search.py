"""``linattn graph search``: the signature (q, p) whose curvature is nearest to that of a graph."""

from dataclasses import dataclass
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.lab.experiment import RIGHT
from linattn.lab.screen import Screen
from linattn.lab.tasks.graph.curvature import PAIRS, REFERENCES, sectional_curvature
from linattn.lab.tasks.graph.data import GraphData
from linattn.lab.tasks.graph.files import load_graph
from linattn.support.config import Config, option
from linattn.support.options import OptionError

FLAT = 0.1  # mean curvatures up to this size count as flat
NARROW, WIDE = 0.5, 5.0  # least and greatest spread of a space's curvature, in units of the mean
DATA = (
    "A folder of PyTorch Geometric's raw files, an .npz file, an edge list, or a generated graph such as tree:4:6, "
    "cycle:10, grid:32:32, random:1000:8, communities:1000:4."
)


class Signature(NamedTuple):
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
        >>> from linattn.lab.tasks.graph.generated import cycle, tree
        >>> [search_signature(graph)[:2] for graph in (tree(4, 5), cycle(8), cycle(100))]
        [(0, 16), (16, 0), (8, 8)]
    """
    curvature = sectional_curvature(data.edge_index, data.num_nodes, references=references, pairs=pairs, seed=seed)
    if not len(curvature):
        raise ValueError("curvature needs a node with two neighbours or more, and there is none")
    mean, std = float(curvature.double().mean()), float(curvature.double().std(unbiased=False))
    return Signature(*nearest_signature(mean, std, dimension), mean, std, curvature)


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
        low, high, bins = low - 0.5, high + 0.5, 1
    counts = values.double().histc(bins, low, high).long().tolist()
    bars = ["█" * round(width * count / max(counts)) or ("▏" if count else "") for count in counts]
    middles = [low + (i + 0.5) * (high - low) / bins for i in range(bins)]
    return [f"{m:+8.3f}  {bar:<{width}}  {count:,}" for m, bar, count in zip(middles, bars, counts, strict=True)]


@dataclass(frozen=True, kw_only=True)
class SearchSpace(Config):
    """Print the signature (q, p) = (time, space) that suits a graph, with a histogram of its curvature.

    Exit code: 0 all right, 2 a bad option.
    """

    data: str = option(help=DATA, argument=True)
    dimension: int = option(16, "q + p, even.", least=4)
    references: int = option(REFERENCES, "Nodes that distances are measured from.", least=1)
    pairs: int = option(PAIRS, "Pairs of neighbours looked at around a node.", least=2)
    seed: int = option(0, "Seed of both draws.", least=0)

    def check(self) -> None:
        if self.dimension % 2:
            raise OptionError("dimension", f"must be even, got {self.dimension}")

    def run(self, screen: Screen) -> int:
        data = load_graph(self.data)
        settings = {"dimension": self.dimension, "references": self.references, "pairs": self.pairs, "seed": self.seed}
        try:
            space = search_signature(data, **settings)
        except ValueError as error:
            raise OptionError("data", f"{self.data}: {error}") from error
        screen.say(f"{data.name}: {data.num_nodes:,} nodes, {data.num_edges // 2:,} edges")
        screen.say(f"(q, p) = ({space.q}, {space.p})  time and space dimensions, {space.kind}")
        spread = f"mean {space.mean:+.3f}, spread {space.std:.3f}"
        screen.say(f"curvature of {len(space.curvature):,} nodes: {spread}")
        for line in histogram(space.curvature):
            screen.say(line)
        screen.result({"q": space.q, "p": space.p, "mean": space.mean, "std": space.std})
        return RIGHT
