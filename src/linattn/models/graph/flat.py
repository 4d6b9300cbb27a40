"""Graph transformers in flat space: attention over all nodes beside graph convolutions."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from linattn.models.graph.convolution import ConvolutionStack
from linattn.models.graph.features import apply_linear
from linattn.models.graph.global_attention import BLOCKS
from linattn.models.graph.graph import Graph
from linattn.models.graph.model import GraphModel
from linattn.ops.shared.checks import check_choice


class FlatGraphTransformer(GraphModel):
    """``z = w norm(g) + (1 - w) t``: t from attention over all nodes, g from graph convolutions; then a linear map.

    Args:
        in_channels: C of the nodes.
        hidden: width of both branches.
        out_channels: number of classes, or width of the embeddings for links.
        task: ``"nodes"`` or ``"links"``.
        block: ``"sgformer"``, ``"difformer"``, ``"polynormer"``, or ``"mechanism"``, a transformer with any mechanism.
        mechanism: name of the mechanism, for ``block="mechanism"``.
        num_layers: number of attention blocks.
        num_heads: heads of each block.
        graph_layers: number of graph convolutions; 0: no such branch.
        graph_weight: w, the weight of the graph convolutions.
        dropout: dropout rate in the attention branch.
        graph_dropout: dropout rate in the convolution branch.
        mechanism_options: options of the mechanism.
    """

    def __init__(
        self,
        in_channels: int,
        hidden: int,
        out_channels: int,
        *,
        task: str = "nodes",
        block: str = "mechanism",
        mechanism: str = "elu",
        num_layers: int = 1,
        num_heads: int = 1,
        graph_layers: int = 2,
        graph_weight: float = 0.8,
        dropout: float = 0.2,
        graph_dropout: float = 0.5,
        mechanism_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(task)
        check_choice("block", block, tuple(BLOCKS))
        if not 0 <= graph_weight <= 1:
            raise ValueError(f"graph_weight must be in [0, 1], got {graph_weight!r}")
        self.graph_weight, self.dropout, self.graph_dropout = graph_weight, dropout, graph_dropout
        self.input, self.input_norm = nn.Linear(in_channels, hidden), nn.LayerNorm(hidden)
        own = (mechanism, mechanism_options) if block == "mechanism" else ()
        self.blocks = nn.ModuleList(BLOCKS[block](hidden, num_heads, dropout, *own) for _ in range(num_layers))
        self.convolutions = ConvolutionStack(in_channels, hidden, graph_layers, graph_dropout) if graph_layers else None
        # The attention branch ends in numbers of size 1, while those of the convolutions are as small as the features:
        # without this norm the sum would hold little more than the nodes' own features.
        self.graph_norm = nn.LayerNorm(hidden) if graph_layers else None
        self.head = nn.Linear(hidden, out_channels)

    def embed(self, graph: Graph) -> Tensor:
        x = F.dropout(self.input_norm(apply_linear(self.input, graph.features())).relu(), self.dropout, self.training)
        for block in self.blocks:
            x = block(x, graph)
        if self.convolutions is not None and self.graph_norm is not None:
            near = self.graph_norm(self.convolutions(graph.features(self.graph_dropout, self.training), graph))
            x = self.graph_weight * near + (1 - self.graph_weight) * x
        return x if self.task == "nodes" else self.head(x)

    def classify(self, z: Tensor, graph: Graph) -> Tensor:
        return self.head(z)
