"""``linattn graph search``: the signature (q, p) whose curvature is nearest to that of a graph.

Curvature is sectional, at the nodes of a graph, after Gu et al. (Learning mixed-curvature representations, 2019).
"""

from dataclasses import dataclass
from math import log
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from linattn.lab.experiment import RIGHT
from linattn.lab.screen import Screen
from linattn.lab.tasks.graph.data import GraphData
from linattn.lab.tasks.graph.files import SOURCES, load_graph
from linattn.support.config import Config, option
from linattn.support.options import OptionError

REFERENCES, PAIRS = 50, 50
FLAT = 0.1  # mean curvatures up to this size count as flat
NARROW, WIDE = 0.5, 5.0  # least and greatest spread of a space's curvature, in units of the mean
DATA = f"{SOURCES[0].upper()}{SOURCES[1:]}."


def sectional_curvature(
    edge_index: Tensor, num_nodes: int, *, references: int = REFERENCES, pairs: int = PAIRS, seed: int = 0
) -> Tensor:
    """Curvature at each node m with two neighbours or more, ``(M,)``: below 0 where the graph branches like a tree,
    above 0 where paths meet again, 0 where it is flat.

    For neighbours b, c of m and a reference node a != m,

        xi(m; b, c; a) = d(a,m)/2 + d(b,c)^2 / (8 d(a,m)) - (d(a,b)^2 + d(a,c)^2) / (4 d(a,m)),

    and the curvature at m is the mean over pairs (b, c) of the mean of xi over all a that are connected to m.

    Args:
        edge_index: both directions of each edge, sorted, as :class:`GraphData` has them.
        references: how many nodes a are drawn; all nodes if there are no more than that.
        pairs: how many pairs (b, c) are drawn for a node; all pairs if, counted in both orders, there are no more than
            that. xi does not change when b and c are exchanged.
        seed: seed of both draws.
    """
    draw, edge_index = torch.Generator().manual_seed(seed), edge_index.cpu()
    sources = torch.randperm(num_nodes, generator=draw)[:references]
    node, b, c = neighbour_pairs(edge_index, num_nodes, pairs, draw)
    if not len(node):
        return torch.empty(0)
    adjacent = torch.isin(b * num_nodes + c, edge_index[0] * num_nodes + edge_index[1])
    across = torch.where(adjacent, 1.0, 4.0)  # d(b, c)^2: adjacent, or two steps through m
    total, count = torch.zeros(2, len(node))
    for from_a in distances(edge_index, num_nodes, sources):  # one by one: all pairs at once would fill the memory
        to_m = from_a[node]
        seen = to_m > 0  # a is neither m itself nor out of reach
        near = to_m.clamp(min=1)
        xi = near / 2 + (across / 2 - from_a[b].square() - from_a[c].square()) / (4 * near)
        total += torch.where(seen, xi, 0.0)
        count += seen
    node, mean = node[count > 0], (total / count)[count > 0]
    sums = torch.zeros(num_nodes).index_add_(0, node, mean)
    drawn = node.bincount(minlength=num_nodes)
    return sums[drawn > 0] / drawn[drawn > 0]


def distances(edge_index: Tensor, num_nodes: int, sources: Tensor) -> Tensor:
    """Distances ``(S, N)`` from each source to each node, in edges; -1 where there is no path."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import dijkstra

    matrix = csr_array((np.ones(edge_index.shape[1]), edge_index.numpy()), shape=(num_nodes, num_nodes))
    found = dijkstra(matrix, indices=sources.numpy(), unweighted=True)
    return torch.from_numpy(np.where(np.isinf(found), -1, found).astype(np.float32))


def neighbour_pairs(
    edge_index: Tensor, num_nodes: int, most: int, draw: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes m ``(P,)`` and two different neighbours b, c of each: all pairs b < c of a node that has at most ``most``
    pairs in both orders, else ``most`` draws."""
    first, of = edge_index
    degree = first.bincount(minlength=num_nodes)
    start, ordered = degree.cumsum(0) - degree, degree * (degree - 1)
    rank = torch.arange(len(of)) - start[first]  # of c among the neighbours of m: as many b come before it
    rank = torch.where(ordered[first] <= most, rank, 0)
    place = torch.arange(len(of)).repeat_interleave(rank)  # of c
    partner = torch.arange(len(place)) - (rank.cumsum(0) - rank)[place]
    node = first[place]
    many = (ordered > most).nonzero().flatten().repeat_interleave(most)
    i, j = ((torch.rand(many.shape, generator=draw, dtype=torch.float64) * (degree[many] - k)).long() for k in (0, 1))
    j += j >= i  # any but i
    b, c = torch.cat((start[node] + partner, start[many] + i)), torch.cat((place, start[many] + j))
    return torch.cat((node, many)), of[b], of[c]


class Signature(NamedTuple):
    """``q`` time and ``p`` space dimensions; q > p is spherical, q < p hyperbolic; and the curvature that chose them,
    its mean, its spread, and that at each node with two neighbours or more."""

    q: int
    p: int
    mean: float
    std: float
    curvature: Tensor

    @property
    def kind(self) -> str:
        return "flat" if self.q == self.p else "spherical" if self.q > self.p else "hyperbolic"


def search_signature(
    data: GraphData, *, dimension: int = 16, references: int = REFERENCES, pairs: int = PAIRS, seed: int = 0
) -> Signature:
    """Fit a normal distribution to the curvature at all nodes; find the nearest space with q + p = ``dimension``.

    Args:
        data: anything with ``edge_index`` (both directions of each edge, sorted) and ``num_nodes``.
        dimension: q + p, even.
        references, pairs, seed: as for :func:`sectional_curvature`.

    Example:
        >>> from linattn.lab.tasks.graph.generated import cycle, tree
        >>> [search_signature(graph)[:2] for graph in (tree(4, 5), cycle(8), cycle(100))]
        [(0, 16), (16, 0), (8, 8)]
    """
    curvature = sectional_curvature(data.edge_index, data.num_nodes, references=references, pairs=pairs, seed=seed)
    if not len(curvature):
        raise OptionError("data", f"{data.name}: curvature needs a node with two neighbours or more, and there is none")
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
        raise OptionError("dimension", f"must be even and at least 4, got {dimension}")
    half = dimension // 2
    if abs(mean) <= FLAT:
        return half, half
    spreads = torch.linspace(NARROW, WIDE, half, dtype=torch.float64) * abs(mean)
    divergence = [log(s) + std**2 / (2 * s**2) for s in spreads.tolist()]
    smaller = min(range(half), key=divergence.__getitem__)
    return (dimension - smaller, smaller) if mean > 0 else (smaller, dimension - smaller)


@dataclass(frozen=True, kw_only=True)
class SearchSpace(Config):
    """Print the signature (q, p) = (time, space) that suits a graph, with the mean and spread of its curvature.

    Exit code: 0 all right, 2 a bad option.
    """

    data: str = option(help=DATA, argument=True)
    dimension: int = option(16, "q + p, even.", least=4)
    references: int = option(REFERENCES, "Nodes that distances are measured from.", least=1)
    pairs: int = option(PAIRS, "Pairs of neighbours looked at around a node.", least=2)
    seed: int = option(0, "Seed of both draws.", least=0)

    def run(self, screen: Screen) -> int:
        data = load_graph(self.data)
        space = search_signature(data, **{key: value for key, value in self.values().items() if key != "data"})
        screen.say(f"{data.name}: {data.num_nodes:,} nodes, {data.num_edges // 2:,} edges")
        screen.say(f"(q, p) = ({space.q}, {space.p})  time and space dimensions, {space.kind}")
        spread = f"mean {space.mean:+.3f}, spread {space.std:.3f}"
        screen.say(f"curvature of {len(space.curvature):,} nodes: {spread}")
        screen.result({name: getattr(space, name) for name in ("q", "p", "mean", "std")})
        return RIGHT
