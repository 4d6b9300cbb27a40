"""Features for graphs that have none."""

import torch
from torch import Tensor

from linattn.lab.tasks.graph.pairs import undirected

MOST_IDENTITY = 8192  # nodes: an identity matrix of this size has 256 MiB
MOST_DEGREE = 63


def default_features(edges: Tensor, nodes: int) -> Tensor:
    """The identity matrix, so that a model can tell nodes apart; above 8,192 nodes the degree, one-hot, cut at 63."""
    if nodes <= MOST_IDENTITY:
        return torch.eye(nodes)
    degrees = undirected(edges, nodes)[0].bincount(minlength=nodes).clamp_(max=MOST_DEGREE)
    return torch.nn.functional.one_hot(degrees, MOST_DEGREE + 1).float()
