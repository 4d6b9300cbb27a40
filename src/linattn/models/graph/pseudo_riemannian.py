"""The graph transformer on the pseudo-hyperboloid."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from linattn.models.graph.graph import Graph
from linattn.models.graph.manifold import PseudoHyperboloid, Split
from linattn.models.graph.model import GraphModel
from linattn.models.graph.split_attention import SplitAttention, TransformerBlock
from linattn.models.graph.split_layers import (
    MERGES,
    ConvolutionBlock,
    Curvature,
    InputMap,
    Merge,
    Signature,
    SplitActivation,
    SplitDropout,
    SplitLinear,
    SplitNorm,
    check_signature,
)
from linattn.ops.shared.call import check_choice

HYPERBOLIC = "hyperbolic"


class PseudoRiemannianGraphTransformer(GraphModel):
    """Attention over all nodes beside graph convolutions, in a space with q directions of time and p of space.

    Nodes are points of the pseudo-hyperboloid of signature (q, p), kept as a point of a sphere and a space part. The
    attention branch is ``norm, linear, activation, dropout``, blocks of :class:`TransformerBlock` and a linear map; the
    convolution branch consists of :class:`ConvolutionBlock` blocks. Their weighted merge m is read by
    ``logits = W (pi/2) m``, which is ``W log_o(Phi(m))``, or for links by its geodesic distances.

    Paper: Le and Ta, NeurIPS 2025 (openreview bChA28jPpm). The authors use ``input_map="neighbours"``,
    ``input_norm=False``, ``weight_dropout=True``, ``graph_norm=True`` and a separate ``graph_dropout``. One difference
    cannot be switched off: a part with fewer than 3 channels has no layer norm, which would leave only its sign.

    Args:
        in_channels: C of the nodes.
        hidden: q + p.
        out_channels: number of classes, or for links the dimension of the embedding space, split into q and p in the
            same proportion.
        task: ``"nodes"`` or ``"links"``.
        mechanism: name of a bidirectional mechanism.
        signature: (q, p) = (time, space), or ``"hyperbolic"`` for (0, hidden); None: halves, time the larger.
        num_layers: number of attention blocks; 0: convolutions alone.
        num_heads: heads of each block.
        graph_layers: number of graph convolutions on the manifold; 0: no such branch.
        graph_weight: weight of the convolutions in the merge.
        activation: ``"tanh"``, ``"relu"``, ``"gelu"``, ``"silu"`` or ``"elu"``.
        dropout: dropout rate of coordinates in the attention branch, or a rate of time and one of space.
        weight_dropout: also drop entries of weights, at the rates of ``dropout``: of the maps before and after the
            blocks and of those to q, k and v.
        graph_dropout: as ``dropout``, for the convolutions; None: the same rates.
        input_dropout: dropout rate of the node features.
        norm: layer norms in the attention branch.
        graph_norm: layer norms between the convolutions, after the sum over neighbours.
        residual: ``"transport"``, the paper's, ``"midpoint"`` (Hypformer) or None.
        merge: ``"exponential"``, the paper's, or ``"midpoint"``.
        input_map: how features are mapped into the tangent space at the pole: ``"linear"``, each node alone;
            ``"neighbours"`` (the paper's), summed over its neighbours; ``"convolution"``, over these and itself; or
            ``"normalized"``, averaged as in a GCN.
        input_hops: how often the input map sums or averages over neighbours.
        feature_encoding: add a second input map, whose points are merged with those of the first by the midpoint:
            Hypformer's encoding of positions.
        input_norm: True for a layer norm of the input's tangent vectors, which gives them length 1 however small the
            features are; ``"bounded"`` limits their length smoothly and keeps short ones short; False for neither.
        degree_encoding: largest degree that has its own embedding, which larger ones share; 0: no encoding.
        radius: initial value of r; the curvature is ``-r^2``.
        learn_curvature: learn the radius.
        temperature: learn a factor of q and k in every head.
        head_signature, combine, value_path, centroid, mechanism_options: as in :class:`SplitAttention`.

    Example:
        >>> import torch
        >>> from linattn.models.graph import Graph, PseudoRiemannianGraphTransformer
        >>> model = PseudoRiemannianGraphTransformer(8, 6, 3, signature=(2, 4))
        >>> ring = torch.arange(5)
        >>> model(Graph(torch.randn(5, 8), torch.stack([ring, ring.roll(1)]))).shape
        torch.Size([5, 3])
    """

    def __init__(
        self, in_channels: int, hidden: int, out_channels: int, *, task: str = "nodes", mechanism: str = "elu",
        signature: tuple[int, int] | Literal["hyperbolic"] | None = None, num_layers: int = 1, num_heads: int = 1,
        graph_layers: int = 2, graph_weight: float = 0.8, activation: str = "tanh",
        dropout: float | tuple[float, float] = 0.2, weight_dropout: bool = False,
        graph_dropout: float | tuple[float, float] | None = None, input_dropout: float = 0.0, norm: bool = True,
        graph_norm: bool = False, residual: str | None = "transport", merge: str = "exponential",
        input_map: str = "linear", input_hops: int = 1, input_norm: bool | str = True, feature_encoding: bool = False,
        degree_encoding: int = 0, radius: float = 1.0, learn_curvature: bool = False, temperature: bool = False,
        head_signature: tuple[int, int] | None = None, combine: str = "mean", value_path: bool = False,
        centroid: bool = False, mechanism_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(task)
        check_choice("merge", merge, tuple(MERGES))
        if signature is None:
            signature = hidden - hidden // 2, hidden // 2
        inner = check_signature("signature", (0, hidden) if signature == HYPERBOLIC else signature)
        if sum(inner) != hidden:
            raise ValueError(f"signature (q, p) = {tuple(inner)} must add up to hidden = {hidden}")
        if min(num_layers, graph_layers) < 0 or not num_layers + graph_layers:
            raise ValueError(
                f"num_layers and graph_layers must be >= 0 and not both 0, got {num_layers}, {graph_layers}"
            )
        outer = inner if task == "nodes" else _scaled(inner, out_channels)
        self.signature, self.input_dropout = inner, input_dropout
        self.curvature = Curvature(radius, learn_curvature)
        self.input = InputMap(
            in_channels, inner, input_map, degree_encoding, merge, input_norm, input_hops, feature_encoding
        )
        rates, graph_rates = _rates(dropout), _rates(dropout if graph_dropout is None else graph_dropout)
        weight_rates = rates if weight_dropout else (0.0, 0.0)
        head = None if head_signature is None else check_signature("head_signature", head_signature)
        self.stem, self.blocks, self.last = None, nn.ModuleList(), None
        if num_layers:
            mapped = SplitLinear(inner, inner, weight_rates=weight_rates), SplitActivation(activation)
            self.stem = nn.Sequential(SplitNorm(inner) if norm else nn.Identity(), *mapped, SplitDropout(*rates))
            for _ in range(num_layers):
                attention = SplitAttention(
                    inner, num_heads, mechanism, head_signature=head, combine=combine, temperature=temperature,
                    value_path=value_path, centroid=centroid, weight_rates=weight_rates,
                    mechanism_options=mechanism_options,
                )  # fmt: skip
                self.blocks.append(TransformerBlock(attention, residual, activation, rates, norm))
            self.last = SplitLinear(inner, outer, weight_rates=weight_rates)
        ends = [inner] * (graph_layers - 1) + [outer] * (graph_layers > 0)
        self.convolutions = nn.ModuleList(
            ConvolutionBlock(inner, end, activation, graph_rates, graph_norm and place + 1 < graph_layers)
            for place, end in enumerate(ends)
        )
        self.merge = Merge(merge, graph_weight) if num_layers and graph_layers else None
        self.out_signature = outer if self.merge is None else self.merge.after(outer)
        # Phi(m) has a leading 0, for which a weight would never learn.
        self.head = nn.Linear(sum(self.out_signature) + 1, out_channels, bias=False) if task == "nodes" else None

    def points(self, graph: Graph) -> Split:
        """The nodes as points of signature ``out_signature``."""
        near = far = self.input(graph.features(self.input_dropout, self.training), graph, self.curvature())
        if self.stem is not None and self.last is not None:
            far = self.stem(far)
            for block in self.blocks:
                far = block(far, graph)
            far = self.last(far)
        for convolution in self.convolutions:
            near = convolution(near, graph)
        merged: Split = near if self.stem is None else far if self.merge is None else self.merge(near, far)
        return merged

    def embed(self, graph: Graph) -> Tensor:
        """Logits of nodes, or coordinates on the pseudo-hyperboloid, time first: ``(N, q + 1 + p)``."""
        z = self.points(graph).joined()
        return z if self.head is None else self.head(torch.pi / 2 * z)

    @property
    def manifold(self) -> PseudoHyperboloid:
        """The space in which the embeddings lie."""
        return PseudoHyperboloid(*self.out_signature, self.curvature())

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        return self.manifold.distance(x, y)

    def extra_repr(self) -> str:
        return f"(q, p)={tuple(self.signature)}, task={self.task!r}"


def _rates(dropout: float | tuple[float, float]) -> tuple[float, float]:
    return dropout if isinstance(dropout, tuple) else (dropout, dropout)


def _scaled(signature: Signature, total: int) -> Signature:
    """The signature with ``total`` dimensions nearest in proportion; parts that exist keep a dimension if possible."""
    if sum(signature) == total:
        return signature
    q = round(signature.q * total / sum(signature))
    lowest, highest = min(signature.q, 1), total - min(signature.p, 1)
    q = min(max(q, lowest), max(highest, 0))
    return Signature(q, total - q)
