"""Building blocks of the graph transformer on the pseudo-hyperboloid."""

from torch import Tensor, nn

from linattn.models.graph.features import Nonzero, apply_linear
from linattn.models.graph.graph import Edges, Graph
from linattn.models.graph.split import Split, from_pole, merge, midpoint, residual
from linattn.models.graph.split_attention import SplitAttention
from linattn.models.graph.split_layers import (
    Signature,
    SplitActivation,
    SplitDropout,
    SplitLinear,
    SplitNorm,
    aggregate,
    layer_norm,
)
from linattn.ops.shared.checks import check_choice

RESIDUALS = {"transport": residual, "midpoint": midpoint, None: None}
MERGES = {"exponential": merge, "midpoint": midpoint}
INPUT_MAPS = ("linear", "neighbours", "convolution", "normalized")
INPUT_NORMS = (True, False, "bounded")
_DEGREE_WEIGHT = 0.5


class Bounded(nn.Module):
    """``v / sqrt(1 + |v|^2)``: short vectors hardly change, and none gets longer than 1. ``(..., D)`` to the same.

    Geodesics of time are circles: vectors longer than a half turn come back, and distant features would look like near
    ones. A layer norm prevents that too, but makes a node without any known word as certain as any other.
    """

    def forward(self, v: Tensor) -> Tensor:
        return v * (1 + v.square().sum(-1, keepdim=True)).rsqrt()


class Merge(nn.Module):
    """Merge two points with weights w and 1 - w; ``"exponential"`` adds a dimension of time, ``"midpoint"`` none."""

    def __init__(self, kind: str, weight: float) -> None:
        super().__init__()
        check_choice("merge", kind, tuple(MERGES))
        if not 0 <= weight <= 1:
            raise ValueError(f"the weight of a merge must be in [0, 1], got {weight!r}")
        self.kind, self.weight = kind, weight

    def forward(self, x: Split, y: Split) -> Split:
        return MERGES[self.kind](x, y, self.weight)

    def after(self, signature: Signature) -> Signature:
        return signature.grown() if self.kind == "exponential" else signature

    def extra_repr(self) -> str:
        return f"{self.kind!r}, weight={self.weight:g}"


class InputMap(nn.Module):
    """Features ``(N, C)`` to points: ``exp_o(0, W x + b)``, with the degree's embedding merged in and mapped back.

    ``"neighbours"`` is ``A x W + b``, PyTorch Geometric's ``GCNConv(normalize=False)``; ``"convolution"`` is
    ``(A + 1) (x W + b)``, which includes the node itself and one b for each summand; ``"normalized"`` is the same with
    ``D^-1/2 (A + 1) D^-1/2``. Each sums ``hops`` times. ``norm`` brings tangent vectors to length 1 by a layer norm:
    features as small as those of normalised rows would leave every node beside the pole, where dropping a coordinate
    changes more than all that distinguishes nodes. ``encoded`` adds a second map of this kind with weights of its own,
    and returns the midpoints of both maps' points.
    """

    def __init__(
        self, in_channels: int, signature: Signature, kind: str, max_degree: int, merging: str,
        norm: bool | str = False,
        hops: int = 1,
        encoded: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_choice("input_map", kind, INPUT_MAPS)
        if max_degree < 0:
            raise ValueError(f"degree_encoding must be >= 0, got {max_degree}")
        if hops < 1:
            raise ValueError(f"input_hops must be >= 1, got {hops}")
        self.signature, self.kind, self.max_degree, self.hops = signature, kind, max_degree, hops
        self.linear = nn.Linear(in_channels, sum(signature))
        nn.init.xavier_uniform_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        check_choice("input_norm", norm, INPUT_NORMS)
        self.norm = Bounded() if norm == "bounded" else layer_norm(sum(signature)) if norm else nn.Identity()
        if isinstance(self.norm, nn.LayerNorm):
            nn.init.constant_(self.norm.weight, sum(signature) ** -0.5)
        self.degree, self.merge, self.back = None, None, None
        if max_degree:
            self.degree = nn.Embedding(max_degree + 1, sum(signature))
            nn.init.normal_(self.degree.weight, std=0.1)
            self.merge = Merge(merging, _DEGREE_WEIGHT)
            self.back = SplitLinear(self.merge.after(signature), signature)
        self.encoding = InputMap(in_channels, signature, kind, 0, merging, norm, hops) if encoded else None

    def forward(self, x: Tensor | Nonzero, graph: Graph, radius: Tensor | float) -> Split:
        point = self._point(self.norm(self._tangent(x, graph)), radius)
        if self.encoding is not None:
            point = midpoint(point, self.encoding(x, graph, radius))
        if self.degree is None or self.merge is None or self.back is None:
            return point
        encoding = self._point(self.degree(graph.degree.clamp(max=self.max_degree)), radius)
        return self.back(self.merge(encoding, point))

    def _tangent(self, x: Tensor | Nonzero, graph: Graph) -> Tensor:
        if self.kind == "linear":
            return apply_linear(self.linear, x)
        if self.kind == "neighbours":
            return self._summed(apply_linear(self.linear, x, with_bias=False), graph.as_given) + self.linear.bias
        edges = graph.normalized if self.kind == "normalized" else graph.looped
        return self._summed(apply_linear(self.linear, x), edges)

    def _summed(self, x: Tensor, edges: Edges) -> Tensor:
        for _ in range(self.hops):
            x = edges.aggregate(x)
        return x

    def _point(self, tangent: Tensor, radius: Tensor | float) -> Split:
        time, space = tangent.split(list(self.signature), -1)
        return from_pole(time, space, radius)


class TransformerBlock(nn.Module):
    """``x <- dropout(activation(linear(residual(attention(norm(x)), x))))``; the signature (q, p) stays.

    The residual by transport adds a dimension of time, which the linear map removes again.
    """

    def __init__(
        self, attention: SplitAttention, kind: str | None, activation: str, rates: tuple[float, float], norm: bool
    ) -> None:
        super().__init__()
        check_choice("residual", kind, tuple(RESIDUALS))
        signature = attention.signature
        self.kind = kind
        self.norm = SplitNorm(signature) if norm else nn.Identity()
        self.attention = attention
        self.linear = SplitLinear(signature.grown() if kind == "transport" else signature, signature)
        self.activation, self.dropout = SplitActivation(activation), SplitDropout(*rates)

    def forward(self, x: Split, graph: Graph) -> Split:
        out: Split = self.attention(self.norm(x), graph)
        join = RESIDUALS[self.kind]
        out = out if join is None else join(out, x)
        return self.dropout(self.activation(self.linear(out)))


class ConvolutionBlock(nn.Module):
    """``x_i <- dropout(activation(norm(centroid_j(linear(x_j)))))`` over a node and its neighbours."""

    def __init__(
        self, before: Signature, after: Signature, activation: str, rates: tuple[float, float], norm: bool = False
    ) -> None:
        super().__init__()
        self.linear = SplitLinear(before, after)
        self.norm = SplitNorm(after) if norm else nn.Identity()
        self.activation, self.dropout = SplitActivation(activation), SplitDropout(*rates)

    def forward(self, x: Split, graph: Graph) -> Split:
        return self.dropout(self.activation(self.norm(aggregate(self.linear(x), graph))))
