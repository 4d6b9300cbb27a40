"""The graph, or packed graphs, that models read; PyTorch Geometric's ``Data`` is read by its attributes alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.ops.shared.packing import sequence_of_tokens

MOST_FILLED = 0.2  # up to this share of nonzero numbers, skipping zeros is faster


class Nonzero(NamedTuple):
    """Features ``(N, C)`` without their zeros: row i has ``values[starts[i]:starts[i + 1]]`` in ``columns``."""

    starts: Tensor
    columns: Tensor
    values: Tensor


def find_nonzero(x: Tensor) -> Nonzero | None:
    """The nonzero numbers of ``x (N, C)``; None if there are many, or if a dense product is as good.

    A dense product is better on a GPU, which multiplies zeros fast and would have to be waited for to count them, and
    in compiled graphs, which cannot depend on a count.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.requires_grad or not x.numel():
        return None
    nonzero = x != 0
    if int(nonzero.sum()) > MOST_FILLED * x.numel():
        return None
    counts = nonzero.sum(1)
    return Nonzero(counts.cumsum(0) - counts, nonzero.nonzero()[:, 1], x[nonzero])


def apply_linear(linear: nn.Linear, x: Tensor | Nonzero, *, with_bias: bool = True) -> Tensor:
    """``W x + b`` for features in either form, or ``W x`` without the bias."""
    bias = linear.bias if with_bias else None
    if isinstance(x, Tensor):
        return F.linear(x, linear.weight, bias)
    y = F.embedding_bag(x.columns, linear.weight.t(), x.starts, mode="sum", per_sample_weights=x.values)
    return y if bias is None else y + bias


class Edges(NamedTuple):
    """Weighted edges: the target of each edge receives ``weight (E,)`` times what its ``source (E,)`` holds."""

    source: Tensor
    target: Tensor
    weight: Tensor

    def aggregate(self, x: Tensor) -> Tensor:
        """``y_i = sum_{j -> i} w_ij x_j``: x ``(N, C)`` to ``(N, C)``."""
        messages = x[self.source] * self.weight.to(x.dtype).unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, self.target, messages)


def computed_once(compute: Callable[["Graph"], Any]) -> Any:
    """A property that is computed once (torch.compile does not support the lock of functools.cached_property)."""

    def value(graph: "Graph") -> Any:
        if compute.__name__ not in graph._kept:
            graph._kept[compute.__name__] = compute(graph)
        return graph._kept[compute.__name__]

    return property(value, doc=compute.__doc__)


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
        """x after dropout, in the sparse form where that is faster; for :func:`apply_linear`."""
        sparse: Nonzero | None = self._nonzero
        rate = dropout if training else 0.0
        if sparse is None:
            return F.dropout(self.x, rate) if rate else self.x
        return sparse._replace(values=F.dropout(sparse.values, rate)) if rate else sparse  # zeros stay zeros

    @computed_once
    def _nonzero(self) -> Nonzero | None:
        return find_nonzero(self.x)

    @computed_once
    def degree(self) -> Tensor:
        """Number of edges that end in each node, without loops: ``(N,)`` int64."""
        source, target = self.edge_index
        return target.new_zeros(self.num_nodes).index_add(0, target, (source != target).long())

    @computed_once
    def as_given(self) -> Edges:
        """``A``: the edges as they were given; nodes without a loop get none."""
        source, target = self.edge_index
        weight = self.x.new_ones(source.shape) if self.edge_weight is None else self.edge_weight.to(self.x.dtype)
        return Edges(source, target, weight)

    @computed_once
    def looped(self) -> Edges:
        """``A + 1``: every node has one loop of weight 1, which replaces any loops that were given."""
        source, target, weight = self.as_given
        nodes = torch.arange(self.num_nodes, device=source.device)
        # Given loops stay in place with weight 0: removing them would wait for the device to count.
        weight = torch.cat([weight.masked_fill(source == target, 0), weight.new_ones(self.num_nodes)])
        return Edges(torch.cat([source, nodes]), torch.cat([target, nodes]), weight)

    @computed_once
    def normalized(self) -> Edges:
        """``D^-1/2 (A + 1) D^-1/2``: :attr:`looped`, normalised."""
        source, target, weight = self.looped
        degree = weight.new_zeros(self.num_nodes).index_add(0, target, weight)
        factor = degree.clamp(min=torch.finfo(degree.dtype).tiny).rsqrt()
        return Edges(source, target, factor[source] * weight * factor[target])

    @computed_once
    def _graph_of_node(self) -> Tensor:
        assert self.cu_seqlens is not None
        return sequence_of_tokens(self.cu_seqlens, self.num_nodes)

    def total(self, values: Tensor) -> Tensor:
        """Sum ``values (N, ...)`` over each graph and return the sum for each of its nodes: ``(N or 1, ...)``."""
        if self.cu_seqlens is None:
            return values.sum(0, keepdim=True)
        sums = values.new_zeros(self.cu_seqlens.shape[0] - 1, *values.shape[1:])
        return sums.index_add(0, self._graph_of_node, values)[self._graph_of_node]


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
        raise TypeError(f"data.x must be a floating tensor (N, C) of node features, got {_words(x)}")
    if not isinstance(edge_index, Tensor) or edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise TypeError(f"data.edge_index must be an int64 tensor (2, E), got {_words(edge_index)}")
    ptr, batch = getattr(data, "ptr", None), getattr(data, "batch", None)
    if ptr is None and batch is not None:
        if batch.shape != x.shape[:1]:
            raise ValueError(f"data.batch must have shape ({x.shape[0]},), one graph a node, got {tuple(batch.shape)}")
        if bool((batch[1:] < batch[:-1]).any()):
            raise ValueError("data.batch must be sorted: the nodes of a graph lie side by side")
        counts = torch.bincount(batch)
        ptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    offsets = ptr.to(x.device) if ptr is not None and ptr.shape[0] > 2 else None
    return Graph(x, edge_index.long(), getattr(data, "edge_weight", None), offsets)


def _words(value: object) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
