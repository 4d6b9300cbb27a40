"""The graph, or packed graphs, that models read; PyTorch Geometric's ``Data`` is read by its attributes alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.models.graph.features import Nonzero, find_nonzero
from linattn.ops.shared.packing import sequence_of_tokens


class Edges(NamedTuple):
    """Weighted edges: the target of each edge receives ``weight (E,)`` times what its ``source (E,)`` holds."""

    source: Tensor
    target: Tensor
    weight: Tensor

    def aggregate(self, x: Tensor) -> Tensor:
        """``y_i = sum_{j -> i} w_ij x_j``: x ``(N, C)`` to ``(N, C)``."""
        messages = x[self.source] * self.weight.to(x.dtype).unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, self.target, messages)


@dataclass(frozen=True)
class Graph:
    """One or several graphs: nodes ``x (N, C)`` and edges ``edge_index (2, E)`` from row 0 to row 1.

    ``cu_seqlens (G+1,)`` are the offsets of several graphs among the nodes, None for one graph. What is derived from
    the edges is computed once and shared by all layers of a forward pass.
    """

    x: Tensor
    edge_index: Tensor
    edge_weight: Tensor | None = None
    cu_seqlens: Tensor | None = None
    _kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_nodes(self) -> int:
        return self.x.shape[0]

    def features(self, dropout: float = 0.0, training: bool = False) -> Tensor | Nonzero:
        """x after dropout, in the sparse form where that is faster; for ``apply_linear``."""
        found: Tensor | Nonzero = self._once("features", self._features)
        if not training or not dropout:
            return found
        return F.dropout(found, dropout) if isinstance(found, Tensor) else found.dropped(dropout)

    def _features(self) -> Tensor | Nonzero:
        found = find_nonzero(self.x)
        return self.x if found is None else found

    @property
    def degree(self) -> Tensor:
        """Number of edges that end in each node, without loops: ``(N,)`` int64."""
        return self._once("degree", self._degree)

    def _degree(self) -> Tensor:
        source, target = self.edge_index
        return target.new_zeros(self.num_nodes).index_add(0, target, (source != target).long())

    @property
    def as_given(self) -> Edges:
        """``A``: the edges as they were given; nodes without a loop get none."""
        return self._once("as_given", self._as_given)

    def _as_given(self) -> Edges:
        source, target = self.edge_index
        return Edges(source, target, self._weights(source))

    def _weights(self, source: Tensor) -> Tensor:
        return self.x.new_ones(source.shape) if self.edge_weight is None else self.edge_weight.to(self.x.dtype)

    @property
    def looped(self) -> Edges:
        """``A + 1``: every node has one loop of weight 1, which replaces any loops that were given."""
        return self._once("looped", self._looped)

    def _looped(self) -> Edges:
        source, target = self.edge_index
        # Given loops stay in place with weight 0: removing them would wait for the device to count.
        weight = self._weights(source).masked_fill(source == target, 0)
        nodes = torch.arange(self.num_nodes, device=source.device)
        weight = torch.cat([weight, weight.new_ones(self.num_nodes)])
        return Edges(torch.cat([source, nodes]), torch.cat([target, nodes]), weight)

    @property
    def normalized(self) -> Edges:
        """``D^-1/2 (A + 1) D^-1/2``: :attr:`looped`, normalised."""
        return self._once("normalized", self._normalized)

    def _normalized(self) -> Edges:
        source, target, weight = self.looped
        degree = weight.new_zeros(self.num_nodes).index_add(0, target, weight)
        factor = degree.clamp(min=torch.finfo(degree.dtype).tiny).rsqrt()
        return Edges(source, target, factor[source] * weight * factor[target])

    @property
    def graph_of_node(self) -> Tensor:
        """Number of the graph that each node belongs to, ``(N,)`` int64."""
        return self._once("graph_of_node", self._graph_of_node)

    def _graph_of_node(self) -> Tensor:
        if self.cu_seqlens is None:
            return torch.zeros(self.num_nodes, dtype=torch.int64, device=self.x.device)
        return sequence_of_tokens(self.cu_seqlens, self.num_nodes)

    def _once(self, name: str, compute: Callable[[], Any]) -> Any:
        """Compute a value once and keep it (torch.compile does not support the lock of functools.cached_property)."""
        if name not in self._kept:
            self._kept[name] = compute()
        return self._kept[name]

    def total(self, values: Tensor) -> Tensor:
        """Sum ``values (N, ...)`` over each graph and return the sum for each of its nodes: ``(N or 1, ...)``."""
        if self.cu_seqlens is None:
            return values.sum(0, keepdim=True)
        sums = values.new_zeros(self.cu_seqlens.shape[0] - 1, *values.shape[1:])
        return sums.index_add(0, self.graph_of_node, values)[self.graph_of_node]


def read_graph(data: Any) -> Graph:
    """Read any object with ``x``, ``edge_index`` and, for several graphs, ``ptr`` or ``batch`` into a :class:`Graph`.

    ``ptr (G+1,)`` are offsets; ``batch (N,)`` holds the graph of each node, in ascending order as from PyTorch
    Geometric's loader. If a graph is used again, keep the result and pass it to the model: it also keeps what is
    derived.
    """
    if isinstance(data, Graph):
        return data
    x, edge_index = getattr(data, "x", None), getattr(data, "edge_index", None)
    if not isinstance(x, Tensor) or x.ndim != 2 or not x.is_floating_point():
        found = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"data.x must be a floating tensor (N, C) of node features, got {found}")
    if not isinstance(edge_index, Tensor) or edge_index.ndim != 2 or edge_index.shape[0] != 2:
        found = str(tuple(edge_index.shape)) if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise TypeError(f"data.edge_index must be an int64 tensor (2, E), got {found}")
    offsets = _offsets(getattr(data, "ptr", None), getattr(data, "batch", None), x)
    return Graph(x, edge_index.long(), getattr(data, "edge_weight", None), offsets)


def _offsets(ptr: Tensor | None, batch: Tensor | None, x: Tensor) -> Tensor | None:
    if ptr is None and batch is None:
        return None
    if ptr is None:
        assert batch is not None
        if batch.shape != x.shape[:1]:
            raise ValueError(f"data.batch must have shape ({x.shape[0]},), one graph a node, got {tuple(batch.shape)}")
        if bool((batch[1:] < batch[:-1]).any()):
            raise ValueError("data.batch must be sorted: the nodes of a graph lie side by side")
        counts = torch.bincount(batch)
        ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return ptr.to(x.device) if ptr.shape[0] > 2 else None
