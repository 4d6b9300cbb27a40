"""Linear attention on the pseudo-hyperboloid, one mechanism call on the spheres and one on the space parts."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import create_mechanism, mechanism_info
from linattn.models.graph.graph import Graph
from linattn.models.graph.manifold import Split, midpoint, residual, restored
from linattn.models.graph.manifold import centroid as centroid_of
from linattn.models.graph.split_layers import Signature, SplitActivation, SplitDropout, SplitLinear, SplitNorm
from linattn.ops.shared.call import check_choice

COMBINATIONS = ("mean", "concat")
RESIDUALS = {"transport": residual, "midpoint": midpoint, None: None}
# Their weights can be negative or differ between channels of v, or they normalise the sum.
NOT_FOR_CENTROIDS = ("angular", "gated", "hydra", "inline", "mala", "mlstm", "pola", "pola_plus", "retention", "zeros",
                     "zeros_softmax")  # fmt: skip


class SplitAttention(nn.Module):
    """``sphere_i = r o_i / |o_i|`` and ``space_i = o_i``, with o the mechanism's output on that part of q, k and v.

    q, k, v of every head are :class:`SplitLinear` maps of x. Heads are averaged, or concatenated and mapped back, and
    the constraint is restored. The two parts have separate attention weights. Nodes of several graphs are packed, and
    only see nodes of their own graph. The output has the signature (q, p) of the points.

    Args:
        signature: (q, p) of the points.
        num_heads: number of heads.
        mechanism: a bidirectional name of ``linattn.list_mechanisms()``. One that depends on the order of tokens uses
            that of the nodes.
        head_signature: (q, p) of each head's q, k and v (None: the points'); another one needs ``combine="concat"``.
        combine: ``"mean"`` of the heads, or ``"concat"`` and a map without bias.
        temperature: learn a factor of q and k for every head and part, initially 1.
        value_path: add a linear map of v to the output, which keeps its rank (Hypformer).
        centroid: make the space part that of the Lorentz centroid ``r m / sqrt(-<m, m>)`` of all heads' v on the
            hyperboloid, ``m_i = sum_j w_ij v_j`` with the mechanism's weights, instead of the mean of the space parts.
            This needs an output that is a sum of v with weights that are never negative and the same for all channels:
            the mechanisms of ``NOT_FOR_CENTROIDS`` are refused. The heights cost a second call of the mechanism.
        weight_rates: dropout rates, of time and of space, for the weights of the maps to q, k and v.
        mechanism_options: options of the mechanism.
    """

    def __init__(
        self, signature: Signature, num_heads: int = 1, mechanism: str = "elu", *,
        head_signature: Signature | None = None, combine: str = "mean", temperature: bool = False,
        value_path: bool = False, centroid: bool = False, weight_rates: tuple[float, float] = (0.0, 0.0),
        mechanism_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_choice("combine", combine, COMBINATIONS)
        if centroid and (combine != "mean" or value_path):
            raise ValueError("centroid=True is a mean of points and needs combine='mean' and value_path=False, got "
                             f"combine={combine!r} and value_path={value_path}")  # fmt: skip
        if centroid and mechanism in NOT_FOR_CENTROIDS:
            raise ValueError(
                "centroid=True needs sums of v with weights that are never negative and the same for all channels, and "
                f"mechanism {mechanism!r} gives others: take another one, such as 'elu'"
            )
        head = signature if head_signature is None else head_signature
        if combine == "mean" and head != signature:
            raise ValueError(f"head_signature {tuple(head)} is not that of the points, {tuple(signature)}: heads can "
                             "only be combined by combine='concat'")  # fmt: skip
        for name, inner, outer in (("time", head.q, signature.q), ("space", head.p, signature.p)):
            if bool(inner) != bool(outer):
                both = f"head_signature {tuple(head)} and the points' {tuple(signature)}"
                raise ValueError(f"{both} must both have {name}, or neither")
        self.signature, self.head, self.num_heads = signature, head, num_heads
        self.centroid = centroid
        self.qkv = SplitLinear(signature, head, groups=3 * num_heads, weight_rates=weight_rates)
        options = dict(mechanism_options or {}) | {"num_heads": num_heads, "input_dim": signature.q + 1 + signature.p}
        widths = {"sphere": head.q + 1 if head.q else 0, "space": head.p}
        self.parts = nn.ModuleDict()
        for part, width in widths.items():
            after = signature.q + 1 if part == "sphere" else signature.p
            if width:
                attend = _mechanism(mechanism, width, part, options)
                self.parts[part] = _Part(attend, after, combine, temperature, value_path)

    def forward(self, x: Split, graph: Graph) -> Split:
        qkv, coordinates = self.qkv(x), x.joined()
        out = {"sphere": torch.ones_like(x.sphere), "space": x.space}
        for name, part in self.parts.items():
            out[name] = part(getattr(qkv, name), coordinates, graph)
        if self.centroid and self.head.p:
            # The mechanism needs a v as wide as its heads, which the space part fills: heights and the sum of weights
            # (the output for a v of ones) take another call.
            heights = qkv.height[:, 2 * self.num_heads :]
            rest = torch.cat([heights, torch.ones_like(heights)], -1)
            space = self.parts["space"]
            assert isinstance(space, _Part)
            height, total = space.mean_of(rest, qkv.space, coordinates, graph).split(1, -1)
            return centroid_of(out["sphere"], torch.cat([height, out["space"]], -1), total, x.radius)
        return restored(out["sphere"], out["space"], x.radius)


class _Part(nn.Module):
    """Attention of one part: q, k, v ``(N, 3 H, D)`` to ``(N, C)``."""

    def __init__(self, mechanism: Mechanism, width: int, combine: str, temperature: bool, value_path: bool) -> None:
        super().__init__()
        H, D = mechanism.num_heads, mechanism.head_dim
        self.mechanism = mechanism
        self.factor = nn.Parameter(torch.ones(H, 1, 1)) if temperature else None
        self.value = nn.Linear(D, D) if value_path else None
        self.out = nn.Linear(H * D, width, bias=False) if combine == "concat" else None

    def forward(self, qkv: Tensor, coordinates: Tensor, graph: Graph) -> Tensor:
        q, k, v = self._heads(qkv)
        o: Tensor = self.mechanism(q, k, v, cu_seqlens=graph.cu_seqlens, x=coordinates.unsqueeze(0))
        if self.value is not None:
            o = o + self.value(v)
        o = o.squeeze(0)
        return o.mean(0) if self.out is None else self.out(o.transpose(0, 1).flatten(1))

    def mean_of(self, values: Tensor, qkv: Tensor, coordinates: Tensor, graph: Graph) -> Tensor:
        """What the weights of :meth:`forward` give for other ``values (N, H, C)``, averaged over heads: ``(N, C)``."""
        q, k, v = self._heads(qkv)
        width, given = v.shape[-1], values.shape[-1]  # the mechanism takes values of its own width
        outputs = [
            self.mechanism(q, k, part, cu_seqlens=graph.cu_seqlens, x=coordinates.unsqueeze(0))
            for part in F.pad(values.transpose(0, 1).unsqueeze(0), (0, -given % width)).split(width, -1)
        ]
        return torch.cat(outputs, -1)[0, ..., :given].mean(0)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.unflatten(1, (3, -1)).permute(1, 2, 0, 3).unsqueeze(1).unbind()  # (1, H, N, D) each
        return (q, k, v) if self.factor is None else (q * self.factor, k * self.factor, v)


def _mechanism(name: str, width: int, part: str, options: Mapping[str, Any]) -> Mechanism:
    if not mechanism_info(name).bidirectional:
        raise ValueError(f"nodes have no order, and mechanism {name!r} is only causal: take a bidirectional one")
    try:
        return create_mechanism(name, head_dim=width, **options)
    except ValueError as error:
        hint = f"the {part} part of a head: head_signature=(q, p) with combine='concat' makes them q + 1 and p wide"
        raise ValueError(f"{error} ({hint})") from error


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
