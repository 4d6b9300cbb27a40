"""The class of graphs that all readers and generators return."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from linattn.lab.tasks.graph.pairs import undirected

MASKS = ("train_mask", "val_mask", "test_mask")


@dataclass(frozen=True)
class GraphData:
    """A graph with the attribute names of PyTorch Geometric's ``Data``: models accept both classes.

    Args:
        x: features of the nodes, ``(N, F)``.
        edge_index: ``(2, E)``, both directions of each edge, without loops and repeats; see :meth:`of_edges`.
        y: classes of the nodes ``(N,)``, if there are any.
        train_mask, val_mask, test_mask: bool ``(N,)``, if there is a split.
        name: the name of the graph in tables.
        edge_weight, batch, ptr: as in PyTorch Geometric; readers do not set them.
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor | None = None
    train_mask: Tensor | None = None
    val_mask: Tensor | None = None
    test_mask: Tensor | None = None
    name: str = "graph"
    edge_weight: Tensor | None = None
    batch: Tensor | None = None
    ptr: Tensor | None = None

    def __post_init__(self) -> None:
        if self.x.ndim != 2:
            raise ValueError(f"x must be (nodes, features), got {tuple(self.x.shape)}")
        nodes = len(self.x)
        if self.edge_index.ndim != 2 or len(self.edge_index) != 2 or self.edge_index.dtype != torch.int64:
            given = f"{self.edge_index.dtype} {tuple(self.edge_index.shape)}"
            raise ValueError(f"edge_index must be int64 of shape (2, edges), got {given}")
        if self.edge_index.device.type == "cpu" and self.edge_index.numel():  # elsewhere it would wait for the device
            least, most = int(self.edge_index.min()), int(self.edge_index.max())
            if least < 0 or most >= nodes:
                raise ValueError(f"edge_index must be within 0..{nodes - 1}, the rows of x, got {least}..{most}")
        for name in ("y", *MASKS):
            value = getattr(self, name)
            if value is not None and value.shape != (nodes,):
                raise ValueError(f"{name} must be ({nodes},), one for each row of x, got {tuple(value.shape)}")

    @classmethod
    def of_edges(cls, x: Tensor, edges: Tensor, **others: object) -> "GraphData":
        """Make a graph of edges in any order, in one direction or both; loops and repeats are dropped."""
        return cls(x, undirected(edges, len(x)), **others)  # type: ignore[arg-type]

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
    def has_split(self) -> bool:
        return all(getattr(self, name) is not None for name in MASKS)

    def to(self, device: torch.device | str) -> "GraphData":
        held = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in held.items()}
        return replace(self, **moved)
