"""MirrorLA: queries and keys are reflected into the positive region before the ReLU."""

import copy
import math
from dataclasses import replace
from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mechanisms.base import Call, CommonOptions, LinearBase, MechanismOutput
from linattn.mechanisms.common.tokens import count_tokens, mean_eps, query_mask, sum_over_tokens, with_mean_eps
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.linear.call import FeatureMaps
from linattn.ops.maps import PairRelu, Relu
from linattn.ops.reflection.api import modulated_angles, pair_matrices, pooled_variance, reflect_heads
from linattn.ops.reflection.types import Modulation
from linattn.ops.shared import call as checks
from linattn.ops.shared.call import hide

MODULATIONS = ("sequence", "token", "none")


@register_mechanism("mirror", paper="arXiv:2602.04346", year=2026)
class Mirror(LinearBase):
    """Linear attention with learned reflections of queries and keys, so that the ReLU after them cuts less away.

    ``o_t = sum_s phi(q_t).phi(k_s) v_s / (sum_s phi(q_t).phi(k_s) + 1e-6 n)``, ``phi(x) = relu(H_block H_cross x)``

    ``H_cross = I - 2 w w^T / |w|^2`` acts on the channels of all heads; ``H_block = I - 2 u u^T`` on every pair of
    channels of a head, with ``u = (cos Theta, sin Theta)`` and
    ``Theta = theta + pi/2 tanh(amplitude) tanh(gain log(var + 1e-6) + bias)``, where var is the pair's variance.

    var is taken over q and k together and gives one Theta for both, so that before the ReLU ``(H q).(H k) = q.k``, over
    all heads, or head by head without H_cross. n is the number of keys, or 1 when causal. q ``(B, H, T, D)``, k and v
    ``(B, H_kv, T, D)``, D even, output ``(B, H, T, D)``. Angles are per kv head, shared by its query heads. At the
    start theta is uniform in (-pi, pi), w normal, amplitude and bias are 0 and gain is 1; the gain gets a gradient once
    the amplitude is not 0.

    Paper: MirrorLA. It does not define the modulation and the initial values; those used here are this library's
    choice. State per kv head: ``D (D + 1)`` numbers.

    Args:
        modulation: what var is taken over: ``"sequence"``, all tokens of the sequence (queries are included where q and
            k have one length; not causal); ``"token"``, the two channels of one token, so that ``(H q).(H k) = q.k``
            holds within a token only; ``"none"``: no modulation. None: ``"sequence"``, or ``"token"`` when causal.
        reflections: 1, or 2: two reflections of each kind, one after the other, make a rotation that starts as the
            identity, for models that were trained with plain ReLU features. The modulation acts on the second.
        cross_head: whether to reflect across heads; needs as many kv heads as heads.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("mirror", num_heads=2, head_dim=8)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v).shape, mechanism.modulation
        (torch.Size([1, 2, 5, 8]), 'sequence')
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        modulation: Literal["sequence", "token", "none"] | None = None,
        reflections: Literal[1, 2] = 1,
        cross_head: bool = True,
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(num_heads, head_dim, **common)
        checks.check_choice("modulation", modulation, (*MODULATIONS, None))
        checks.check_choice("reflections", reflections, (1, 2))
        checks.check_flag("cross_head", cross_head)
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, since pairs of channels are reflected, got {head_dim}")
        if self.causal and modulation == "sequence":
            raise ValueError("modulation='sequence' sees the whole sequence: with causal=True use 'token' or 'none'")
        if cross_head and self.num_kv_heads != num_heads:
            raise ValueError(
                f"cross_head=True reflects q and k across all heads and needs equal numbers of them, got {num_heads} "
                f"heads and {self.num_kv_heads} kv heads: pass cross_head=False"
            )
        self.reflections: int = reflections
        self.cross_head = cross_head
        self.modulation = modulation or ("token" if self.causal else "sequence")
        pairs = (self.num_kv_heads, head_dim // 2)
        self.angles = nn.Parameter(torch.empty(reflections, *pairs))
        self.normals = nn.Parameter(torch.empty(reflections, num_heads, 1, head_dim)) if cross_head else None
        modulated = self.modulation != "none"
        self.amplitude = nn.Parameter(torch.empty(pairs)) if modulated else None
        self.gain = nn.Parameter(torch.empty(pairs)) if modulated else None
        self.bias = nn.Parameter(torch.empty(pairs)) if modulated else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.angles.copy_(self.angles[0].uniform_(-math.pi, math.pi).clone())
            if self.normals is not None:
                self.normals.copy_(self.normals[0].normal_(0, (self.num_heads * self.head_dim) ** -0.5).clone())
        for parameter, start in ((self.amplitude, 0.0), (self.gain, 1.0), (self.bias, 0.0)):
            if parameter is not None:
                nn.init.constant_(parameter, start)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        # Angles that differ from token to token, by itself or by its packed sequence, are no parameters of a map.
        per_token = self.modulation == "token" or (self.modulation == "sequence" and call.cu_seqlens is not None)
        if len(self.angles) and not per_token:
            over_sequence = self.modulation == "sequence"
            crossed = reflect_heads(q, k, self.normals, variance=over_sequence, key_mask=call.key_mask, impl=call.impl)
            own, other = pair_matrices(self.angles, crossed.variance, self._modulation, impl=call.impl)
            pairs = PairRelu(own, other)
            map_q, eps = with_mean_eps(pairs, q, k, call, causal=self.causal)
            maps: FeatureMaps = (map_q, pairs)
            phi, psi = crossed.q, crossed.k
        else:
            phi, psi = self._reflect(q, k, call)
            phi, eps = mean_eps(phi, k, call, causal=self.causal)
            maps = Relu()
        arguments = {"q": phi.to(q.dtype), "k": psi.to(k.dtype), "v": v, "feature_map": maps, "eps": eps}
        return self.linear(call, arguments)

    def reflect(
        self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The reflected queries and keys ``H q`` and ``H k``, before the ReLU, in fp32 or fp64."""
        for name, x, heads in (("q", q, self.num_heads), ("k", k, self.num_kv_heads)):
            checks.check_tensor(name, x, "(B, H, T, D)", 4)
            checks.check_shape(name, x, (k.shape[0], heads, x.shape[2], self.head_dim))
        if key_mask is not None:
            checks.check_key_mask(key_mask, k.shape[0], k.shape[2], k)
            k = hide(k, key_mask)
        if cu_seqlens is not None:
            checks.check_cu_seqlens(cu_seqlens, k.shape[0], k.shape[2], k, checks.check_values(k, None))
        return self._reflect(q, k, Call(self.impl, key_mask, cu_seqlens))

    def truncated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The reflected queries and keys."""
        return self.reflect(q, k)

    def energy_loss(
        self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Share of the energy of q and k that the ReLU cuts off, in [0, 1], for use as an auxiliary loss.

        ``sum relu(-y)^2 / sum y^2`` with y the reflected queries and keys of real tokens. Where all of a pair is cut
        off, the loss is flat, and only the gradient through the attention can turn that pair back.
        """
        reflected = self.reflect(q, k, key_mask=key_mask, cu_seqlens=cu_seqlens)
        q, k = hide(reflected[0], key_mask if q.shape[2] == k.shape[2] else None), reflected[1]
        lost = F.relu(-q).square().sum() + F.relu(-k).square().sum()
        return lost / (q.square().sum() + k.square().sum() + torch.finfo(q.dtype).tiny)

    def reflection_matrix(self, *, keys: bool = False) -> Tensor:
        """Matrix H of the queries ``(H D, H D)`` or keys ``(H_kv D, H_kv D)``, heads joined: features ``relu(H x)``.

        A layer may fold it into a projection: ``weight <- H @ weight``, ``bias <- H @ bias``.
        """
        if self.modulation != "none":
            raise ValueError(
                f"modulation={self.modulation!r} makes the reflection depend on the input, so no matrix stands for it; "
                "use modulation='none'"
            )
        heads = self.num_kv_heads if keys else self.num_heads
        rows = torch.eye(heads * self.head_dim, dtype=self.angles.dtype, device=self.angles.device)
        tokens = rows.unflatten(1, (heads, self.head_dim)).transpose(0, 1).unsqueeze(0)  # a token per unit vector
        reflected, _ = self._reflect(tokens, tokens, Call(self.impl))
        return reflected[0].transpose(0, 1).flatten(1).mT.to(rows)

    def without_reflection(self) -> "Mirror":
        """A copy for queries and keys that a projection has already reflected: only the ReLU is left."""
        self.reflection_matrix()  # raises where no projection can stand for the reflection
        bare = copy.deepcopy(self)
        bare.angles, bare.normals = nn.Parameter(self.angles.detach()[:0].clone()), None
        bare.reflections, bare.cross_head = 0, False
        return bare

    @property
    def _modulation(self) -> Modulation | None:
        if self.amplitude is None or self.gain is None or self.bias is None:
            return None
        return Modulation(self.amplitude, self.gain, self.bias)

    def _reflect(self, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        over_rows = self.modulation == "sequence" and call.cu_seqlens is None
        q, k, variance = reflect_heads(
            q, k, self.normals, variance=over_rows, key_mask=call.key_mask, wide=True, impl=call.impl
        )
        if self.modulation == "token":
            variance = variance_within_token(q, k, call)
        elif self.modulation == "sequence" and not over_rows:
            variance = variance_over_packed(q, k, call)
        for angle in modulated_angles(self.angles, variance, self._modulation):
            q, k = reflect_pairs(q, angle), reflect_pairs(k, angle)
        return q, k

    def flops(self, length: int) -> int:
        """Includes the reflections: 2 x 2 matrices in pairs, and across heads a product with w and a multiple of w."""
        kinds = 1 if self.normals is None else 2
        reflections = 4 * self.head_dim * kinds * self.angles.shape[0]
        return super().flops(length) + length * (self.num_heads + self.num_kv_heads) * reflections


def reflect_pairs(x: Tensor, angle: Tensor) -> Tensor:
    """Reflect every pair of neighbouring channels along ``u = (cos angle, sin angle)``.

    x ``(B, H, T, D)``, angle ``(.., H_kv, 1 or T, D/2)``: the query heads of a group share their angles.
    """
    a, b = x.unflatten(1, (angle.shape[-3], -1)).unflatten(-1, (-1, 2)).unbind(-1)  # (B, H_kv, group, T, D/2)
    cos, sin = (2 * angle).cos().unsqueeze(-3), (2 * angle).sin().unsqueeze(-3)
    return torch.stack([-(cos * a + sin * b), cos * b - sin * a], dim=-1).flatten(-2).flatten(1, 2)


def variance_within_token(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """Variance of each pair of channels around the pair's mean, ``((a - b) / 2)^2``: ``(B, H_kv, T, D/2)``.

    It is averaged over the key and the queries that share it, so that one angle serves all of them.
    """
    checks.check_size("k", "length", k.shape[2], q.shape[2], "q")
    q = hide(q, call.key_mask).unflatten(1, (k.shape[1], -1))
    a, b = torch.cat([q, k.unsqueeze(2)], dim=2).unflatten(-1, (-1, 2)).unbind(-1)
    return ((a - b) / 2).square().mean(2)


def variance_over_packed(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """``pooled_variance`` over the real tokens of each token's own packed sequence: ``(B, H_kv, T, D/2)``."""
    mask, H_kv, group = query_mask(q, k, call), k.shape[1], q.shape[1] // k.shape[1]
    q, count = hide(q, mask), (1 + group) * count_tokens(k.shape[2], call, k)

    def mean(q: Tensor, k: Tensor) -> Tensor:
        queries = sum_over_tokens(q.unflatten(1, (H_kv, group)).sum(2), replace(call, key_mask=mask))
        return (queries + sum_over_tokens(k, call)) / count

    return pooled_variance(q, k, mean)
