"""Graphs as all readers and generators return them, and their undirected edges as sorted codes.

The pair i < j of N nodes has the code ``i N + j``.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

MASKS = ("train_mask", "val_mask", "test_mask")
MOST_IDENTITY = 8192  # nodes: an identity matrix of this size has 256 MiB
MOST_DEGREE = 63


@dataclass(frozen=True)
class GraphData:
    """A graph with the attribute names of PyTorch Geometric's ``Data``: models accept both classes.

    Args:
        x: features of the nodes, ``(N, F)``.
        edge_index: ``(2, E)``, both directions of each edge, without loops and repeats; see :meth:`of_edges`.
        y: classes of the nodes ``(N,)``, if there are any.
        train_mask, val_mask, test_mask: bool ``(N,)``, if there is a split.
        name: the name of the graph in tables.
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor | None = None
    train_mask: Tensor | None = None
    val_mask: Tensor | None = None
    test_mask: Tensor | None = None
    name: str = "graph"

    def __post_init__(self) -> None:
        nodes = len(self.x)
        if self.edge_index.device.type == "cpu" and self.edge_index.numel():  # elsewhere it would wait for the device
            least, most = int(self.edge_index.min()), int(self.edge_index.max())
            if least < 0 or most >= nodes:
                raise ValueError(f"edge_index must be within 0..{nodes - 1}, the rows of x, got {least}..{most}")
        for name in ("y", *MASKS):
            value = getattr(self, name)
            if value is not None and value.shape != (nodes,):
                raise ValueError(f"{name} must be ({nodes},), one for each row of x, got {tuple(value.shape)}")

    @classmethod
    def of_edges(cls, x: Tensor | None, edges: Tensor, nodes: int = 0, **others: Any) -> "GraphData":
        """Make a graph of edges in any order, in one direction or both; loops and repeats are dropped.

        Without ``x``, the ``nodes`` have :func:`default_features`.
        """
        nodes = nodes if x is None else len(x)
        edges = both_ways(pairs_of(pair_codes(edges, nodes), nodes), nodes)
        return cls(default_features(edges, nodes) if x is None else x, edges, **others)

    @property
    def num_nodes(self) -> int:
        return len(self.x)

    @property
    def num_edges(self) -> int:
        """Columns of ``edge_index``: twice the number of undirected edges."""
        return self.edge_index.shape[1]

    @property
    def num_features(self) -> int:
        return self.x.shape[1]

    @property
    def num_classes(self) -> int:
        return 0 if self.y is None else int(self.y.max()) + 1

    @property
    def labels(self) -> Tensor:
        """``y``, which must be there."""
        if self.y is None:
            raise ValueError(f"{self.name} has no classes y, so its nodes cannot be split by class")
        return self.y

    @property
    def has_split(self) -> bool:
        return all(getattr(self, name) is not None for name in MASKS)

    def with_masks(self, *parts: Tensor) -> "GraphData":
        """The graph with masks for the nodes of three parts."""
        masks = torch.zeros(3, self.num_nodes, dtype=torch.bool)
        for mask, nodes in zip(masks, parts, strict=True):
            mask[nodes] = True
        return replace(self, **dict(zip(MASKS, masks, strict=True)))

    def to(self, device: torch.device | str) -> "GraphData":
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)  # type: ignore[arg-type]


def default_features(edge_index: Tensor, nodes: int) -> Tensor:
    """The identity matrix, so that a model can tell nodes apart; above 8,192 nodes the degree, one-hot, cut at 63."""
    if nodes <= MOST_IDENTITY:
        return torch.eye(nodes)
    degrees = edge_index[0].bincount(minlength=nodes).clamp_(max=MOST_DEGREE)
    return torch.nn.functional.one_hot(degrees, MOST_DEGREE + 1).float()


def has_degree_features(data: GraphData) -> bool:
    """Whether the features are the degrees that readers use if a large graph has no features."""
    if data.num_nodes <= MOST_IDENTITY or data.num_features != MOST_DEGREE + 1:
        return False
    return torch.equal(data.x, default_features(data.edge_index, data.num_nodes).to(data.x))


def pair_codes(edges: Tensor, num_nodes: int) -> Tensor:
    """Sorted codes of the undirected pairs of ``edges (2, E)``, each once; loops are left out.

    Example:
        >>> import torch
        >>> pair_codes(torch.tensor([[0, 1, 2, 2], [1, 0, 2, 1]]), num_nodes=3).tolist()
        [1, 5]
    """
    low, high = edges.min(0).values, edges.max(0).values
    return torch.unique((low * num_nodes + high)[low < high])


def pairs_of(codes: Tensor, num_nodes: int) -> Tensor:
    """The pairs ``(2, P)`` of codes, with the smaller node first."""
    return torch.stack((codes // num_nodes, codes % num_nodes))


def both_ways(pairs: Tensor, num_nodes: int) -> Tensor:
    """Each pair in both directions, ``(2, 2 P)``, sorted by the first node, then by the second."""
    edges = torch.cat((pairs, pairs.flip(0)), 1)
    return edges[:, (edges[0] * num_nodes + edges[1]).argsort()]
