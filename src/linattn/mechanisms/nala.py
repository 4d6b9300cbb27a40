"""NaLaFormer: the query's norm, which a normalised linear attention loses, becomes an exponent."""

import math
from typing import Literal, Unpack

import torch
from torch import Tensor

from linattn.mechanisms.base import Call, CommonOptions, MechanismOutput
from linattn.mechanisms.common.directions import direction_of, length_of
from linattn.mechanisms.common.over_tokens import mean_eps
from linattn.mechanisms.common.wide import WideLinear, wide
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.checks import check_choice

EPS = 1e-6
ANGLES = ("hard", "direction", "raw", "scaled")


@register_mechanism("nala", paper="arXiv:2506.21137", year=2025)
class Nala(WideLinear):
    """Linear attention whose weights grow sharper with the norm of the query.

    ``o_t = sum_s phi(q_t).psi(k_s) v_s / (sum_s phi(q_t).psi(k_s) + 1e-6 n)``

    ``phi(q) = |d(q)|^p [cos f(q), sin f(q)]``, ``psi(k) = |k|^power [cos f(k), sin f(k)]`` channel by channel, with
    ``d(x) = x / |x|``, ``p = power (tau + tanh |q|)`` and an angle f in [-pi/4, pi/4], so that channels of opposite
    sign count less and no weight is negative. n is the number of keys; causal, 1. q ``(B, H, T, D)``, k and v
    ``(B, H_kv, T, D)``, output ``(B, H, T, D)``. Nothing is learned. Powers leave the range of fp16,
    so its features are fp32.

    Paper: NaLaFormer, Norm x Direction. State per kv head: ``2 D (D + 1)`` numbers.

    Args:
        power: of the keys, and the scale of the queries' exponent.
        tau: added to tanh; the exponent lies between ``power tau`` and ``power (tau + 1)``.
        angle: f. ``"hard"``, as in the paper's code: ``pi/4 sign(x)``, opposite signs do not meet at all, which makes
            the features ``[relu(x)^p, relu(-x)^p]``. Else ``pi/4 tanh(y)`` with y = d(x) (``"direction"``, the paper's
            text, hardly any effect for large D), x (``"raw"``) or ``sqrt(D) d(x)`` (``"scaled"``).

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("nala", num_heads=2, head_dim=8)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v).shape, mechanism.num_features
        (torch.Size([1, 2, 5, 8]), 16)
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        power: float = 3.0,
        tau: float = 0.5,
        angle: Literal["hard", "direction", "raw", "scaled"] = "hard",
        **common: Unpack[CommonOptions],
    ) -> None:
        super().__init__(num_heads, head_dim, **common)
        for name, value in (("power", power), ("tau", tau)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number > 0, got {value!r}")
        check_choice("angle", angle, ANGLES)
        self.power, self.tau, self.angle = float(power), float(tau), angle

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        q, k = wide(q), wide(k)
        exponent = self.power * (self.tau + length_of(q).tanh())
        phi = self._split(_power(direction_of(q).abs(), exponent), q)
        psi = self._split(_power(k.abs(), exponent.new_full((), self.power)), k)
        phi, eps = (phi, EPS) if self.causal else mean_eps(phi, k.shape[2], call)
        return self.linear(call, {"q": phi, "k": psi, "v": v, "eps": eps})

    def _split(self, size: Tensor, x: Tensor) -> Tensor:
        """``size [cos f(x), sin f(x)]``, rotated by pi/4 where f is hard: weights stay, one of each pair is 0."""
        if self.angle == "hard":
            return torch.cat([size * (x > 0), size * (x < 0)], dim=-1)
        y = x if self.angle == "raw" else direction_of(x)
        angle = math.pi / 4 * (y * self.head_dim**0.5 if self.angle == "scaled" else y).tanh()
        return torch.cat([size * angle.cos(), size * angle.sin()], dim=-1)

    @property
    def num_features(self) -> int:
        return 2 * self.head_dim

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, power={self.power:g}, tau={self.tau:g}, angle={self.angle!r}"


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    """``base^exponent`` for ``base >= 0``; at 0 it is 0 with gradients 0, also where an exponent below 1 has a pole."""
    positive = base > 0
    return torch.where(positive, torch.where(positive, base, 1).pow(exponent), 0)
