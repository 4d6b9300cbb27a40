"""Sectional curvature of a graph at its nodes, after Gu et al. (Learning mixed-curvature representations, 2019)."""

import torch
from torch import Tensor

from linattn.lab.tasks.graph.distances import Neighbours, distances_from
from linattn.lab.tasks.graph.pairs import contains

REFERENCES, PAIRS = 50, 50


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
    distances = distances_from(sources, neighbours).float()
    node, b, c = neighbour_pairs(neighbours, pairs, draw)
    if not len(node):
        return torch.empty(0)
    codes = torch.repeat_interleave(torch.arange(num_nodes), neighbours.degree) * num_nodes + neighbours.of
    across = torch.where(contains(codes, b * num_nodes + c), 1.0, 4.0)  # d(b, c)^2: adjacent, or two steps through m
    total, count = torch.zeros(len(node)), torch.zeros(len(node))
    for from_a in distances:  # one by one: references x pairs at once would fill the memory
        to_m = from_a[node]
        seen = to_m > 0  # a is neither m itself nor out of reach
        near = to_m.clamp(min=1)
        xi = near / 2 + (across / 2 - from_a[b].square() - from_a[c].square()) / (4 * near)
        total += torch.where(seen, xi, 0.0)
        count += seen
    kept = count > 0
    node, mean = node[kept], total[kept] / count[kept]
    sums = torch.zeros(num_nodes).index_add_(0, node, mean)
    drawn = node.bincount(minlength=num_nodes)
    return sums[drawn > 0] / drawn[drawn > 0]


def neighbour_pairs(neighbours: Neighbours, most: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes m ``(P,)`` and two different neighbours b, c of each: all pairs b < c of a node that has at most ``most``
    pairs in both orders, else ``most`` draws."""
    degree = neighbours.degree
    ordered = degree * (degree - 1)
    few = ((ordered > 0) & (ordered <= most)).nonzero().flatten()
    second, place = neighbours.expand(few)
    node = few[place]
    rank = torch.arange(len(node)) - (degree[few].cumsum(0) - degree[few])[place]  # of c among the neighbours of m
    partner = torch.arange(int(rank.sum())) - (rank.cumsum(0) - rank).repeat_interleave(rank)  # of b, below c's
    node, c = node.repeat_interleave(rank), second.repeat_interleave(rank)
    b = neighbours.of[neighbours.start[node] + partner]
    many = (ordered > most).nonzero().flatten().repeat_interleave(most)
    shape, wide = many.shape, degree[many]
    i = (torch.rand(shape, generator=draw, dtype=torch.float64) * wide).long()
    j = (torch.rand(shape, generator=draw, dtype=torch.float64) * (wide - 1)).long()
    j += j >= i  # any but i
    drawn = [neighbours.of[neighbours.start[many] + k] for k in (i, j)]
    return torch.cat((node, many)), torch.cat((b, drawn[0])), torch.cat((c, drawn[1]))
