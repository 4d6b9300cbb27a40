"""Undirected edges as sorted codes: the pair i < j of N nodes has the code ``i N + j``."""

import torch
from torch import Tensor


def pair_codes(edges: Tensor, num_nodes: int) -> Tensor:
    """Sorted codes of the undirected pairs of ``edges (2, E)``, each once; loops are left out.

    Example:
        >>> import torch
        >>> pair_codes(torch.tensor([[0, 1, 2, 2], [1, 0, 2, 1]]), num_nodes=3).tolist()
        [1, 5]
    """
    low, high = edges.min(0).values, edges.max(0).values
    kept = low < high
    return torch.unique(low[kept] * num_nodes + high[kept])


def pairs_of(codes: Tensor, num_nodes: int) -> Tensor:
    """The pairs ``(2, P)`` of codes, with the smaller node first."""
    return torch.stack((codes // num_nodes, codes % num_nodes))


def both_ways(pairs: Tensor, num_nodes: int) -> Tensor:
    """Each pair in both directions, ``(2, 2 P)``, sorted by the first node, then by the second."""
    first, second = torch.cat((pairs, pairs.flip(0)), 1)
    order = (first * num_nodes + second).argsort()
    return torch.stack((first[order], second[order]))


def undirected(edges: Tensor, num_nodes: int) -> Tensor:
    """Both directions of each edge of ``edges (2, E)``, once each, sorted and without loops."""
    return both_ways(pairs_of(pair_codes(edges, num_nodes), num_nodes), num_nodes)


def contains(sorted_codes: Tensor, codes: Tensor) -> Tensor:
    """Whether each of ``codes`` is one of ``sorted_codes``."""
    if not len(sorted_codes):
        return torch.zeros_like(codes, dtype=torch.bool)
    place = torch.searchsorted(sorted_codes, codes).clamp_(max=len(sorted_codes) - 1)
    return sorted_codes[place] == codes
