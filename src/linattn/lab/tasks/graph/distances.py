"""Distances between nodes of a graph, counted in edges."""

import torch
from torch import Tensor

UNREACHED = -1


class Neighbours:
    """Neighbours of all nodes in one tensor: those of node i are ``of[start[i] : start[i + 1]]``, sorted."""

    def __init__(self, edge_index: Tensor, num_nodes: int) -> None:
        """``edge_index``: both directions of each edge, as :class:`GraphData` has them."""
        first, second = edge_index
        order = (first * num_nodes + second).argsort()
        self.of = second[order]
        self.degree = first.bincount(minlength=num_nodes)
        self.start = torch.cat((self.degree.new_zeros(1), self.degree.cumsum(0)))
        self.num_nodes = num_nodes

    def expand(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """All neighbours of ``nodes (M,)`` and, for each, the index in ``nodes`` of the node it is a neighbour of."""
        counts = self.degree[nodes]
        source = torch.arange(len(nodes), device=nodes.device).repeat_interleave(counts)
        within = torch.arange(len(source), device=nodes.device) - (counts.cumsum(0) - counts)[source]
        return self.of[self.start[nodes][source] + within], source


def distances_from(sources: Tensor, neighbours: Neighbours) -> Tensor:
    """Distances ``(S, N)`` from each source to each node, in edges; -1 where there is no path.

    The search is breadth first from all sources at once. Each (source, node) is expanded once, so the whole takes
    ``O(S (N + E))`` whatever the diameter. One level of all searches is one round of tensor operations.
    """
    nodes = neighbours.num_nodes
    found = torch.full((len(sources), nodes), UNREACHED, dtype=torch.int32, device=sources.device)
    flat = found.view(-1)
    row = torch.arange(len(sources), device=sources.device)
    node, level = sources, 0
    flat[row * nodes + node] = 0
    while len(node):
        level += 1
        reached, place = neighbours.expand(node)
        codes = row[place] * nodes + reached
        codes = torch.unique(codes[flat[codes] == UNREACHED])
        flat[codes] = level
        row, node = codes // nodes, codes % nodes
    return found
