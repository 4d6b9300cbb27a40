"""Base of all graph models: nodes in, logits of nodes or of pairs of nodes out."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from linattn.models.graph.graph import Graph, read_graph
from linattn.ops.shared.call import check_choice

TASKS = ("nodes", "links")


class FermiDirac(nn.Module):
    """Logits ``(radius - d) / temperature`` of links with probability ``1 / (exp((d - radius) / temperature) + 1)``."""

    def __init__(self, radius: float = 2.0, temperature: float = 1.0) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature must be > 0, got {temperature!r}")
        self.radius, self.temperature = radius, temperature

    def forward(self, distance: Tensor) -> Tensor:
        return (self.radius - distance) / self.temperature

    def extra_repr(self) -> str:
        return f"radius={self.radius:g}, temperature={self.temperature:g}"


class GraphModel(nn.Module, ABC):
    """Base of models of ``data`` with ``x (N, C)``, ``edge_index (2, E)`` and, of several graphs, ``ptr`` or ``batch``.

    Task ``"nodes"``: ``model(data)`` returns logits ``(N, classes)``. Task ``"links"``: ``z = model.encode(data)`` are
    embeddings, and ``model.decode(z, pairs)`` returns logits ``(P,)`` of pairs ``(2, P)`` by the Fermi-Dirac rule on
    the distance, which in flat space is squared.
    """

    def __init__(self, task: str) -> None:
        super().__init__()
        check_choice("task", task, TASKS)
        self.task = task
        self.decoder = FermiDirac()

    @abstractmethod
    def embed(self, graph: Graph) -> Tensor:
        """Logits of nodes ``(N, classes)``, or for links embeddings ``(N, D)``."""

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """The distance ``(...)`` between two embeddings ``(..., D)`` that the decoder reads."""
        return (x - y).square().sum(-1)

    def encode(self, data: Any) -> Tensor:
        """:meth:`embed` of anything that :func:`read_graph` reads."""
        return self.embed(read_graph(data))

    def decode(self, z: Tensor, edge_label_index: Tensor) -> Tensor:
        if self.task != "links":
            raise ValueError(f"decode needs a model of task='links', this one has task={self.task!r}")
        source, target = edge_label_index
        return self.decoder(self.distance(z[source], z[target]))

    def forward(self, data: Any) -> Tensor:
        """Logits of nodes, ``(N, classes)``; for task ``"links"`` logits of ``data.edge_label_index``, ``(P,)``."""
        graph = read_graph(data)
        if self.task == "nodes":
            return self.embed(graph)
        pairs = getattr(data, "edge_label_index", None)
        if pairs is None:
            raise ValueError("task='links' needs the pairs: data.edge_label_index (2, P), or encode and then decode")
        return self.decode(self.embed(graph), pairs)
