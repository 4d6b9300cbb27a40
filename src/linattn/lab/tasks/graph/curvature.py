"""Sectional curvature of a graph at its nodes, after Gu et al. (Learning mixed-curvature representations, 2019)."""

import numpy as np
import torch
from torch import Tensor

REFERENCES, PAIRS = 50, 50


class Neighbours:
    """Neighbours of all nodes in one tensor: those of node i are ``of[start[i] : start[i] + degree[i]]``, sorted."""

    def __init__(self, edge_index: Tensor, num_nodes: int) -> None:
        """``edge_index``: both directions of each edge, as ``GraphData`` has them."""
        order = (edge_index[0] * num_nodes + edge_index[1]).argsort()
        self.node, self.of = edge_index[:, order]
        self.degree = self.node.bincount(minlength=num_nodes)
        self.start = self.degree.cumsum(0) - self.degree

    def distances(self, sources: Tensor) -> Tensor:
        """Distances ``(S, N)`` from each source to each node, in edges; -1 where there is no path."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import dijkstra

        nodes, starts = len(self.degree), torch.cat((self.start, self.degree.sum()[None]))
        matrix = csr_array((np.ones(len(self.of)), self.of.numpy(), starts.numpy()), shape=(nodes, nodes))
        found = dijkstra(matrix, indices=sources.numpy(), unweighted=True)
        return torch.from_numpy(np.where(np.isinf(found), -1, found).astype(np.float32))


def sectional_curvature(
    edge_index: Tensor, num_nodes: int, *, references: int = REFERENCES, pairs: int = PAIRS, seed: int = 0
) -> Tensor:
    """Curvature at each node m with two neighbours or more, ``(M,)``: below 0 where the graph branches like a tree,
    above 0 where paths meet again, 0 where it is flat.

    For neighbours b, c of m and a reference node a != m,

        xi(m; b, c; a) = d(a,m)/2 + d(b,c)^2 / (8 d(a,m)) - (d(a,b)^2 + d(a,c)^2) / (4 d(a,m)),

    and the curvature at m is the mean over pairs (b, c) of the mean of xi over all a that are connected to m.

    Args:
        references: how many nodes a are drawn; all nodes if there are no more than that.
        pairs: how many pairs (b, c) are drawn for a node; all pairs if, counted in both orders, there are no more than
            that. xi does not change when b and c are exchanged.
        seed: seed of both draws.
    """
    draw = torch.Generator().manual_seed(seed)
    neighbours = Neighbours(edge_index.cpu(), num_nodes)
    sources = torch.randperm(num_nodes, generator=draw)[:references]
    node, b, c = neighbour_pairs(neighbours, pairs, draw)
    if not len(node):
        return torch.empty(0)
    codes = neighbours.node * num_nodes + neighbours.of
    adjacent = torch.isin(b * num_nodes + c, codes, assume_unique=False)
    across = torch.where(adjacent, 1.0, 4.0)  # d(b, c)^2: adjacent, or two steps through m
    total, count = torch.zeros(len(node)), torch.zeros(len(node))
    for from_a in neighbours.distances(sources):  # one by one: references x pairs at once would fill the memory
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


def neighbour_pairs(neighbours: Neighbours, most: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes m ``(P,)`` and two different neighbours b, c of each: all pairs b < c of a node that has at most ``most``
    pairs in both orders, else ``most`` draws."""
    of, start, degree = neighbours.of, neighbours.start, neighbours.degree
    ordered = degree * (degree - 1)
    rank = torch.arange(len(of)) - start[neighbours.node]  # of c among the neighbours of m: as many b come before it
    rank = torch.where(ordered[neighbours.node] <= most, rank, 0)
    place = torch.arange(len(of)).repeat_interleave(rank)  # of c
    partner = torch.arange(len(place)) - (rank.cumsum(0) - rank)[place]
    node = neighbours.node[place]
    many = (ordered > most).nonzero().flatten().repeat_interleave(most)
    i = (torch.rand(many.shape, generator=draw, dtype=torch.float64) * degree[many]).long()
    j = (torch.rand(many.shape, generator=draw, dtype=torch.float64) * (degree[many] - 1)).long()
    j += j >= i  # any but i
    b, c = (torch.cat(parts) for parts in ((start[node] + partner, start[many] + i), (place, start[many] + j)))
    return torch.cat((node, many)), of[b], of[c]
