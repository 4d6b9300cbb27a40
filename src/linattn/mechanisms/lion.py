"""LION: a decay that runs both ways, in linear time."""

from dataclasses import replace
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from linattn.mechanisms.base import Call, CommonOptions, LinearBase, MechanismOutput, check_length
from linattn.mechanisms.common.decays import ChannelDecay, HeadDecay, Orders, plane_orders
from linattn.mechanisms.common.tokens import token_positions
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.linear.api import linear_attention
from linattn.ops.linear.call import log_decay_for
from linattn.ops.maps import EluPlusOne, FeatureMap, UnitSilu
from linattn.ops.shared.call import (
    autocast_dtype,
    check_choice,
    check_integer,
    compute_dtype,
    hide,
    num_sequences,
    output_dtype,
)
from linattn.ops.shared.types import DecayIndex, Normalizer

DECAYS = ("none", "fixed", "selective")
FEATURES = ("silu", "elu", "sigmoid", "identity")
# The features that kernels can compute themselves from the queries and keys they read.
MAPS: dict[str, FeatureMap] = {"silu": UnitSilu(), "elu": EluPlusOne()}
EPS = 1e-6


@register_mechanism("lion", paper="arXiv:2502.16249", year=2025, uses_input=True)
class Lion(LinearBase):
    """Linear attention with a decay that runs both ways: LION-LIT, -D and -S.

    ``o_t = sum_s M_ts phi(q_t).phi(k_s) v_s / (sum_s M_ts phi(q_t).phi(k_s) + 1e-6)``, over ``s <= t`` when causal

    with ``phi(x) = (silu(x) + 1/2) / |silu(x) + 1/2|``, positive and of length 1. ``M_ts`` is the product of the decays
    ``lambda`` of the tokens between t and s and of one of these two: of the key (``decay_index="key"``, the official
    code) or of the query (the paper's recurrence); it is 1 for t = s. The weights are divided by their sum after the
    mask M is applied. The decays are, by the option ``decay``,

    - ``"none"`` (LIT): ``lambda = 1``;
    - ``"fixed"`` (D): ``lambda = sigmoid(a)``, with a learned per head and drawn from N(0, 1);
    - ``"selective"`` (S): ``lambda_t = sigmoid(W x_t + b)``, starts near 1/2.

    The forms of the algebra are those of the paper: ``impl="reference"`` is full attention with the matrix M,
    ``"recurrent"`` the two recurrences, ``"chunked"`` the chunkwise form, in linear time where the paper's is tiled.
    q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, x ``(B, T, input_dim)``, needed by ``"selective"`` only, output
    ``(B, H, T, D)``; decays are per kv head.

    Paper: Afzal et al., Linear Attention for Efficient Bidirectional Sequence Modeling. The published vision code
    detaches the selective gates from the gradient, takes ELU + 1 for LIT and writes ``1 - sigmoid``; the published
    code of masked language models has neither features nor scaling (``features="identity", normalizer=None``).
    State per kv head: ``D (D + 1)`` numbers.

    Args:
        decay: ``"none"``, ``"fixed"`` or ``"selective"``.
        decay_per: ``"head"``, or ``"channel"``: a diagonal decay ``lambda = exp(B)``, or, if selective,
            ``exp(B (1 + sigmoid(W x_t + b)))``, with ``B <= 0`` and hence ``lambda <= 1`` whatever is learned. The
            paper's results on the Long Range Arena need it; the paper's ``exp(B + sigmoid(.))`` can exceed 1. B starts
            at HiPPO's real diagonal -1, -2, ... times steps from 0.001 to 0.1 over the heads. (HiPPO's imaginary part
            is a rotation of queries and keys, which belongs to the layer.)
        decay_index: ``"key"`` or ``"query"``; None: ``"key"`` when bidirectional, ``"query"`` when causal.
        features: ``"silu"`` as above, ``"elu"`` (ELU + 1), ``"sigmoid"``, or ``"identity"``: signed scores
            ``q.k / sqrt(D)``, which need ``normalizer=None``.
        normalizer: ``"sum"``, or None: the weights are not divided by their sum.
        order: ``"line"``, the order of the tokens, or ``"snake"`` (LION-natural): two boustrophedon orders over the
            plane ``spatial_shape``, row by row and column by column, each with decays of its own; their matrices M are
            averaged. ``"snake"`` is bidirectional only.
        num_prefix_tokens: number of tokens before all others, such as a class token. They stand before the plane, and
            their selective decay is 1. Bidirectional only.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("lion", num_heads=2, head_dim=8, decay="selective")
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v, x=torch.randn(1, 5, 16)).shape
        torch.Size([1, 2, 5, 8])
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        decay: Literal["none", "fixed", "selective"] = "selective",
        decay_per: Literal["head", "channel"] = "head",
        decay_index: DecayIndex | None = None,
        features: Literal["silu", "elu", "sigmoid", "identity"] = "silu",
        normalizer: Normalizer = "sum",
        order: Literal["line", "snake"] = "line",
        num_prefix_tokens: int = 0,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(num_heads, head_dim, **common)
        check_choice("decay", decay, DECAYS)
        check_choice("decay_per", decay_per, ("head", "channel"))
        check_choice("decay_index", decay_index, ("key", "query", None))
        check_choice("features", features, FEATURES)
        check_choice("normalizer", normalizer, ("sum", None))
        check_choice("order", order, ("line", "snake"))
        check_integer("num_prefix_tokens", num_prefix_tokens, 0)
        if features == "identity" and normalizer == "sum":
            raise ValueError("normalizer='sum' divides by a sum that signed features='identity' can make 0: use None")
        if order == "snake" and decay == "none":
            raise ValueError("order='snake' is an order of decays, but decay='none' has none")
        for name, given in (("order='snake'", order == "snake"), ("num_prefix_tokens > 0", num_prefix_tokens > 0)):
            if given and self.causal:
                raise ValueError(f"{name} needs causal=False: it is for a whole image at once")
        self.decay, self.decay_per, self.decay_index = decay, decay_per, decay_index
        self.features, self.normalizer = features, normalizer
        self.order, self.num_prefix_tokens = order, num_prefix_tokens
        kind = HeadDecay if decay_per == "head" else ChannelDecay
        input_dim = self.input_dim if decay == "selective" else None
        count = 0 if decay == "none" else 2 if order == "snake" else 1
        self.decays = nn.ModuleList(kind(self.num_kv_heads, head_dim, input_dim) for _ in range(count))
        if decay != "selective" and hasattr(type(self), "info"):
            vars(self)["info"] = replace(type(self).info, uses_input=False)  # this one needs no x

    def reset_parameters(self) -> None:
        for own in self.decays:
            own.reset_parameters()  # type: ignore[operator]

    def feature_map(self, x: Tensor) -> Tensor:
        """phi, ``(B, H, T, D)``."""
        if self.features in MAPS:
            return MAPS[self.features](x)
        return x if self.features == "identity" else x.to(compute_dtype(x)).sigmoid().to(x.dtype)

    def log_decay(self, number: int, k: Tensor, call: Call) -> Tensor | None:
        """Log decay of one order: ``(H_kv,)`` fixed per head, else ``(B, H_kv, T)`` or per channel ``(.., T, D)``."""
        if self.decay == "none":
            return None
        own = self.decays[number]
        if self.decay == "fixed":
            decay: Tensor = own(None)
            return decay if decay.ndim == 1 else decay[None, :, None].expand(k.shape[0], -1, k.shape[2], -1)
        decay = own(self.input_of(call.x, k))
        if self.num_prefix_tokens:
            start = torch.zeros(num_sequences(k, call.cu_seqlens), dtype=torch.long, device=k.device)
            positions, _ = token_positions(k.shape[2], call.key_mask, call.cu_seqlens, start)
            prefix = (positions < self.num_prefix_tokens).unsqueeze(1)
            decay = decay.masked_fill(prefix if decay.ndim == 3 else prefix.unsqueeze(-1), 0)
        return decay

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        phi, psi, own = q, k, MAPS.get(self.features)
        reordered = self.order == "snake" and (call.rotate is not None or call.key_mask is not None)
        if own is None or reordered:
            # The features must be turned, and wiped where padded, before tokens are put into another order.
            phi, psi, own = self.feature_map(q), self.feature_map(k), None
        if self.features == "identity":
            phi = phi * self.head_dim**-0.5
        if self.order == "snake":
            return MechanismOutput(self._over_the_plane(phi, psi, v, own, call), None)
        options = {"feature_map": own, "decay_index": self.decay_index, "normalizer": self.normalizer, "eps": EPS}
        return self.linear(call, {"q": phi, "k": psi, "v": v, "log_decay": self.log_decay(0, k, call), **options})

    def _over_the_plane(self, phi: Tensor, psi: Tensor, v: Tensor, own: FeatureMap | None, call: Call) -> Tensor:
        """Add numerators and denominators of both orders, then divide: attention with the average of two matrices M.

        phi and psi are features, or the inputs that the map ``own`` makes features of. The two orders are heads of one
        call. Padding has another place in each order, so it is wiped here.
        """
        orders = plane_orders(psi, call, self.num_prefix_tokens)
        log_decay = self._decays_in(orders, psi, call)
        # The sums of 16-bit inputs are added in fp32, unless autocast is on, which would round them to 16 bits anyway.
        wide = None if autocast_dtype(phi) else compute_dtype(phi, v)

        def summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (self._as_heads(orders.spread(x), k.shape[1]).to(wide or x.dtype) for x in (q, k, v))
            out = linear_attention(
                q, k, v, feature_map=own, log_decay=log_decay, decay_index=self.decay_index, normalizer=None,
                cu_seqlens=call.cu_seqlens, impl=call.impl,
            )  # fmt: skip
            return orders.gather(self._as_tokens(out, k.shape[1] // 2))

        psi, one = hide(psi, call.key_mask), torch.ones_like(v[..., :1])  # features of padding, which is 0, are not 0
        turned = (phi, psi) if call.rotate is None else call.rotate(phi, psi)
        if self.normalizer is None:
            return (summed(*turned, v) / 2).to(output_dtype(v))
        if call.rotate is None:
            total = summed(phi, psi, torch.cat([v, one], dim=-1))  # a column of ones sums the weights
        else:
            total = torch.cat([summed(*turned, v), summed(phi, psi, one)], dim=-1)
        return (total[..., :-1] / (total[..., -1:] + 2 * EPS)).to(output_dtype(v))

    def _decays_in(self, orders: Orders, k: Tensor, call: Call) -> Tensor:
        """Log decays of both orders as heads, ``(2 H_kv,)`` or ``(B, 2 H_kv, T, ..)`` with the tokens in each order."""
        decays = [self.log_decay(number, k, call) for number in range(2)]
        if call.key_mask is not None:
            decays = [log_decay_for(decay, call.key_mask) for decay in decays]
        one, two = (decay for decay in decays if decay is not None)
        if one.ndim == 1:
            return torch.stack([one, two], dim=1).flatten()
        both = orders.spread(torch.stack([one, two], dim=3)).unflatten(2, (2, -1))
        return torch.stack([both[:, :, 0, :, 0], both[:, :, 1, :, 1]], dim=2).flatten(1, 2)

    @staticmethod
    def _as_heads(x: Tensor, num_kv_heads: int) -> Tensor:
        """``(B, H, 2 T, D)`` to ``(B, 2 H, T, D)``, so that the heads of each order still share key heads."""
        return x.unflatten(1, (num_kv_heads, -1)).unflatten(3, (2, -1)).transpose(2, 3).flatten(1, 3)

    @staticmethod
    def _as_tokens(x: Tensor, num_kv_heads: int) -> Tensor:
        """The inverse of :meth:`_as_heads`."""
        return x.unflatten(1, (num_kv_heads, 2, -1)).transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def flops(self, length: int) -> int:
        """A bidirectional decay takes two sweeps in each order; selective gates are computed once per order."""
        check_length(length)
        sweeps = 1 if self.causal or self.decay == "none" else 2 * len(self.decays)
        gates = sum(2 * length * p.numel() for name, p in self.decays.named_parameters() if name.endswith("weight"))
        return super().flops(length) * sweeps + gates
