"""Layers on the pseudo-hyperboloid, and the blocks that the graph transformer is made of.

Each transforms sphere and space part separately and restores the constraint.

A sphere of one coordinate (q = 0) is constant and a space of none (p = 0) is empty: neither has anything to learn.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.models.graph.graph import Graph, Nonzero, apply_linear
from linattn.models.graph.manifold import Split, centroid, from_pole, merge, midpoint, restored
from linattn.ops.shared.call import check_choice

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh, "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "elu": F.elu,
}  # fmt: skip
MERGES = {"exponential": merge, "midpoint": midpoint}
INPUT_MAPS = {"linear": "", "neighbours": "as_given", "convolution": "looped", "normalized": "normalized"}  # edges
INPUT_NORMS = (True, False, "bounded")
_DEGREE_WEIGHT = 0.5
_NARROWEST_NORM = 3  # of 2 channels a layer norm leaves only a sign, of 1 nothing


class Signature(NamedTuple):
    """Dimensions (q, p) = (time, space)."""

    q: int
    p: int

    def grown(self) -> "Signature":
        """The signature with one more dimension of time, as residuals and merges return it."""
        return Signature(self.q + 1, self.p)


def check_signature(name: str, value: object) -> Signature:
    """``value`` as a signature, or an error that names the argument."""
    if (
        not isinstance(value, Sequence) or len(value) != 2 or not all(isinstance(n, int) and n >= 0 for n in value)
        or sum(value) < 1
    ):  # fmt: skip
        raise ValueError(f"{name} must be (q, p) = (time, space), integers >= 0 and not both 0, got {value!r}")
    return Signature(*value)


class Curvature(nn.Module):
    """The radius r of the space, ``r^2 = -beta``: fixed, or learned through a softplus."""

    def __init__(self, radius: float = 1.0, learn: bool = False) -> None:
        super().__init__()
        if not 0 < radius < math.inf:
            raise ValueError(f"radius must be a number > 0, got {radius!r}")
        self.radius = float(radius)
        # The softplus's inverse ``log(exp(z) - 1)``, in a form that does not overflow in fp32 for a radius of 10.
        z = torch.tensor(self.radius**2)
        self.raw = nn.Parameter(z + (-(-z).expm1()).log()) if learn else None

    def forward(self) -> Tensor | float:
        return self.radius if self.raw is None else F.softplus(self.raw).sqrt()

    def extra_repr(self) -> str:
        return f"radius={self.radius:g}, learn={self.raw is not None}"


class SplitLinear(nn.Module):
    """``sphere' = r (W1 sphere + b1) / |.|``, ``space' = W2 (height, space) + b2``: signature to signature.

    Points ``(N, ...)`` to ``(N, ...)`` or, with ``groups``, to ``(N, groups, ...)``: that many maps at once, each
    restored by itself. W2 also reads the hyperboloid's time. ``weight_rates`` are dropout rates of the entries of W1
    and W2.
    """

    def __init__(
        self, before: Signature, after: Signature, *, groups: int | None = None,
        weight_rates: tuple[float, float] = (0.0, 0.0),
    ) -> None:  # fmt: skip
        super().__init__()
        self.before, self.after, self.groups, self.weight_rates = before, after, groups, weight_rates
        self.sphere = self._linear(before.q + 1, after.q + 1) if after.q else None
        self.space = self._linear(before.p + 1, after.p) if after.p else None

    def _linear(self, fan_in: int, fan_out: int) -> nn.Linear:
        linear = nn.Linear(fan_in, fan_out * (self.groups or 1))
        bound = math.sqrt(6 / (fan_in + fan_out))  # Glorot's bound, for one group
        nn.init.uniform_(linear.weight, -bound, bound)
        nn.init.zeros_(linear.bias)
        return linear

    def forward(self, x: Split) -> Split:
        time_rate, space_rate = self.weight_rates
        sphere = self._map(self.sphere, x.sphere, self.after.q + 1, time_rate)
        return restored(sphere, self._map(self.space, x.hyperboloid, self.after.p, space_rate), x.radius)

    def _map(self, linear: nn.Linear | None, x: Tensor, width: int, rate: float) -> Tensor:
        if linear is None:
            return x.new_ones(*x.shape[:-1], *([self.groups] if self.groups else []), width)
        weight = F.dropout(linear.weight, rate, self.training) if rate else linear.weight
        y = F.linear(x, weight, linear.bias)
        return y.unflatten(-1, (self.groups, width)) if self.groups else y

    def extra_repr(self) -> str:
        return f"(q, p) {tuple(self.before)} -> {tuple(self.after)}, groups={self.groups}"


class SplitNorm(nn.Module):
    """Layer norm of each part, restored. Parts of less than 3 channels stay as they are: only a sign would be left."""

    def __init__(self, signature: Signature) -> None:
        super().__init__()
        self.sphere = layer_norm(signature.q + 1)
        self.space = layer_norm(signature.p)

    def forward(self, x: Split) -> Split:
        return restored(self.sphere(x.sphere), self.space(x.space), x.radius)


def layer_norm(width: int) -> nn.Module:
    """A layer norm, or the identity where a norm would leave nothing."""
    return nn.LayerNorm(width) if width >= _NARROWEST_NORM else nn.Identity()


class SplitActivation(nn.Module):
    """An activation applied to each coordinate of both parts, restored."""

    def __init__(self, activation: str = "tanh") -> None:
        super().__init__()
        check_choice("activation", activation, tuple(ACTIVATIONS))
        self.activation = activation

    def forward(self, x: Split) -> Split:
        activate = ACTIVATIONS[self.activation]
        return restored(activate(x.sphere), activate(x.space), x.radius)

    def extra_repr(self) -> str:
        return repr(self.activation)


class SplitDropout(nn.Module):
    """Dropout of coordinates, restored, with separate rates for time and space."""

    def __init__(self, time: float = 0.0, space: float = 0.0) -> None:
        super().__init__()
        for name, rate in (("time", time), ("space", space)):
            if not 0 <= rate < 1:
                raise ValueError(f"the rate of dropout in {name} must be in [0, 1), got {rate!r}")
        self.time, self.space = time, space

    def forward(self, x: Split) -> Split:
        if not self.training or not (self.time or self.space):
            return x
        return restored(F.dropout(x.sphere, self.time), F.dropout(x.space, self.space), x.radius)

    def extra_repr(self) -> str:
        return f"time={self.time:g}, space={self.space:g}"


def aggregate(x: Split, graph: Graph) -> Split:
    """The centroid of a node and its neighbours, weighted by ``D^-1/2 (A + 1) D^-1/2``."""
    parts = torch.cat([x.sphere, x.hyperboloid, torch.ones_like(x.sphere[:, :1])], -1)
    sphere, hyperboloid, total = graph.normalized.aggregate(parts).split([x.q + 1, x.p + 1, 1], -1)
    return centroid(sphere, hyperboloid, total, x.radius)


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
        norm: bool | str = False, hops: int = 1, encoded: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_choice("input_map", kind, tuple(INPUT_MAPS))
        check_choice("input_norm", norm, INPUT_NORMS)
        for name, value, least in (("degree_encoding", max_degree, 0), ("input_hops", hops, 1)):
            if value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        self.signature, self.kind, self.max_degree, self.hops = signature, kind, max_degree, hops
        self.linear = nn.Linear(in_channels, sum(signature))
        nn.init.xavier_uniform_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
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
        if self.degree is not None and self.merge is not None and self.back is not None:
            point = self.back(
                self.merge(self._point(self.degree(graph.degree.clamp(max=self.max_degree)), radius), point)
            )
        return point

    def _tangent(self, x: Tensor | Nonzero, graph: Graph) -> Tensor:
        y = apply_linear(self.linear, x, with_bias=self.kind != "neighbours")
        for _ in range(self.hops if self.kind != "linear" else 0):
            y = getattr(graph, INPUT_MAPS[self.kind]).aggregate(y)
        return y + self.linear.bias if self.kind == "neighbours" else y

    def _point(self, tangent: Tensor, radius: Tensor | float) -> Split:
        time, space = tangent.split(list(self.signature), -1)
        return from_pole(time, space, radius)


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
