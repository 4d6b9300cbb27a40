"""Graph transformers in flat space: attention over all nodes beside graph convolutions.

Several graphs are packed, and every sum over nodes covers the nodes of the same graph.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.layers.attention import Attention
from linattn.layers.block_parts import Mlp
from linattn.models.graph.convolution import ConvolutionStack
from linattn.models.graph.graph import Graph, apply_linear
from linattn.models.graph.model import GraphModel
from linattn.ops.linear.api import linear_attention
from linattn.ops.shared.call import check_choice

_TINY = 1e-12


class SGFormerBlock(nn.Module):
    """``x <- norm(alpha o + (1 - alpha) x)``, ``o_i = (N v_i + sum_j (q_i . k_j) v_j) / (N + sum_j q_i . k_j)``.

    q and k are divided by their Frobenius norms, taken over all heads and the N nodes of the graph. Every head has the
    full width, and heads are averaged (SGFormer, arXiv:2306.10759).
    """

    def __init__(self, hidden: int, num_heads: int, dropout: float, alpha: float = 0.5) -> None:
        super().__init__()
        self.num_heads, self.dropout, self.alpha = num_heads, dropout, alpha
        self.qkv = nn.Linear(hidden, 3 * num_heads * hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(1)  # (N, H, C) each
        o = self.attend(_unit(q, graph), _unit(k, graph), v, graph).mean(1)
        x = self.norm(self.alpha * o + (1 - self.alpha) * x)
        return F.dropout(x, self.dropout, self.training)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, graph: Graph) -> Tensor:
        nodes = graph.total(torch.ones_like(v[:, :1, :1]))
        with_ones = torch.cat([v, torch.ones_like(v[..., :1])], -1)  # the last channel becomes the sum of the weights
        sums = _packed(q, k, with_ones, graph, normalizer=None)
        return (nodes * v + sums[..., :-1]) / (nodes + sums[..., -1:]).clamp(min=_TINY)


class DIFFormerBlock(SGFormerBlock):
    """``x <- norm(alpha o + (1 - alpha) x)``, ``o_i = sum_j (1 + q_i . k_j) v_j / sum_j (1 + q_i . k_j) + (A v)_i``.

    The simple form of DIFFormer (arXiv:2301.09474): q and k are normalised as in :class:`SGFormerBlock`, and a graph
    convolution of v is part of the attention.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, graph: Graph) -> Tensor:
        ones = torch.ones_like(q[..., :1])
        q, k = torch.cat([ones, q], -1), torch.cat([ones, k], -1)  # weights 1 + q . k >= 0
        neighbours = graph.normalized.aggregate(v.flatten(1)).view_as(v)
        return _packed(q, k, v, graph, eps=_TINY) + neighbours


class PolynormerBlock(nn.Module):
    """``x <- relu(W (norm(o) * (h + b)))``, o linear attention with ``sigmoid(W_q x)`` for queries and for keys.

    ``h = W_h x``, ``b = sigmoid(beta)``: the global part of Polynormer (arXiv:2403.01232).
    """

    def __init__(self, hidden: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        _check_heads(hidden, num_heads)
        self.num_heads, self.dropout = num_heads, dropout
        self.q, self.v, self.h, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.beta = nn.Parameter(torch.zeros(hidden))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        heads = (self.num_heads, -1)
        features, v = self.q(x).sigmoid().unflatten(-1, heads), self.v(x).unflatten(-1, heads)
        o = _packed(features, features, v, graph).flatten(1)
        x = self.out(self.norm(o) * (self.h(x) + self.beta.sigmoid())).relu()
        return F.dropout(x, self.dropout, self.training)


class MechanismBlock(nn.Module):
    """``x <- x + attention(norm(x))``, ``x <- x + mlp(norm(x))``, with any mechanism."""

    def __init__(
        self, hidden: int, num_heads: int, dropout: float, mechanism: str, options: Mapping[str, Any] | None
    ) -> None:
        super().__init__()
        _check_heads(hidden, num_heads)
        self.dropout = dropout
        self.attention = Attention(hidden, num_heads, mechanism, mechanism_options=options)
        self.mlp = Mlp(hidden, 2 * hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        o = self.attention(self.norm1(x).unsqueeze(0), cu_seqlens=graph.cu_seqlens).squeeze(0)
        x = x + F.dropout(o, self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


BLOCKS: dict[str, Callable[..., nn.Module]] = {
    "sgformer": SGFormerBlock,
    "difformer": DIFFormerBlock,
    "polynormer": PolynormerBlock,
    "mechanism": MechanismBlock,
}


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
        self, in_channels: int, hidden: int, out_channels: int, *, task: str = "nodes", block: str = "mechanism",
        mechanism: str = "elu", num_layers: int = 1, num_heads: int = 1, graph_layers: int = 2,
        graph_weight: float = 0.8, dropout: float = 0.2, graph_dropout: float = 0.5,
        mechanism_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
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
        return self.head(x)


def _packed(q: Tensor, k: Tensor, v: Tensor, graph: Graph, **options: Any) -> Tensor:
    """``linear_attention`` of packed features ``(N, H, K)`` and values ``(N, H, V)``: ``(N, H, V)``."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    return linear_attention(q, k, v, cu_seqlens=graph.cu_seqlens, **options).squeeze(0).transpose(0, 1)


def _unit(x: Tensor, graph: Graph) -> Tensor:
    """Divide ``x (N, H, C)`` by the norm of all its numbers in the same graph."""
    squares = graph.total(x.square().sum((1, 2), keepdim=True))
    return x * squares.clamp(min=_TINY).rsqrt()


def _check_heads(hidden: int, num_heads: int) -> None:
    if hidden % num_heads:
        raise ValueError(f"num_heads must divide hidden = {hidden}, got {num_heads}")
