"""Graph convolutions in flat space, and the two models that consist of them."""

import torch.nn.functional as F
from torch import Tensor, nn

from linattn.models.graph.graph import Graph, Nonzero, apply_linear
from linattn.models.graph.model import GraphModel


class GraphConvolution(nn.Module):
    """``y = A x W + b`` with ``A = D^-1/2 (A + 1) D^-1/2``: ``(N, C)`` to ``(N, C')``; A is applied ``hops`` times."""

    def __init__(self, in_channels: int, out_channels: int, *, hops: int = 1) -> None:
        super().__init__()
        self.hops = hops
        self.weight = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(self.weight.weight.new_zeros(out_channels))
        nn.init.xavier_uniform_(self.weight.weight)

    def forward(self, features: Tensor | Nonzero, graph: Graph) -> Tensor:
        x = apply_linear(self.weight, features)  # first, so that the edges carry the narrower width
        for _ in range(self.hops):
            x = graph.normalized.aggregate(x)
        return x + self.bias


class ConvolutionStack(nn.Module):
    """Graph convolutions with ReLU and dropout after each: ``(N, in_channels)`` to ``(N, hidden)``."""

    def __init__(self, in_channels: int, hidden: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        widths = [in_channels] + [hidden] * num_layers
        self.layers = nn.ModuleList(map(GraphConvolution, widths[:-1], widths[1:]))
        self.dropout = dropout

    def forward(self, features: Tensor | Nonzero, graph: Graph) -> Tensor | Nonzero:
        for layer in self.layers:
            features = F.dropout(layer(features, graph).relu(), self.dropout, self.training)
        return features


class GraphConvolutionalNetwork(GraphModel):
    """GCN: graph convolutions with ReLU and dropout between them (Kipf and Welling, arXiv:1609.02907).

    Args:
        in_channels: C of the nodes.
        hidden: width between the convolutions.
        out_channels: number of classes, or width of the embeddings for links.
        task: ``"nodes"`` or ``"links"``.
        num_layers: number of convolutions, the last of which gives the output.
        dropout: dropout rate before each convolution.
    """

    def __init__(
        self, in_channels: int, hidden: int, out_channels: int, *, task: str = "nodes", num_layers: int = 2,
        dropout: float = 0.5,
    ) -> None:  # fmt: skip
        super().__init__(task)
        if num_layers < 1:
            raise ValueError(f"num_layers must be >= 1, got {num_layers}")
        self.dropout = dropout
        self.stack = ConvolutionStack(in_channels, hidden, num_layers - 1, dropout)
        self.last = GraphConvolution(hidden if num_layers > 1 else in_channels, out_channels)

    def embed(self, graph: Graph) -> Tensor:
        return self.last(self.stack(graph.features(self.dropout, self.training), graph), graph)


class SimpleGraphConvolution(GraphModel):
    """SGC, ``A^hops x W + b``: a linear model of a node's neighbourhood (Wu et al., arXiv:1902.07153).

    Args:
        in_channels: C of the nodes.
        hidden: not used, as there is nothing between input and output.
        out_channels: number of classes, or width of the embeddings for links.
        task: ``"nodes"`` or ``"links"``.
        hops: how often neighbours are averaged.
        dropout: dropout rate of the input.
    """

    def __init__(
        self, in_channels: int, hidden: int, out_channels: int, *, task: str = "nodes", hops: int = 2,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(task)
        self.dropout = dropout
        self.convolution = GraphConvolution(in_channels, out_channels, hops=hops)

    def embed(self, graph: Graph) -> Tensor:
        return self.convolution(graph.features(self.dropout, self.training), graph)
