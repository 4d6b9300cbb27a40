"""NaLaFormer: the query's norm, which a normalised linear attention loses, becomes an exponent."""

from typing import Literal, Unpack

import torch
from torch import Tensor

from linattn.mechanisms.base import Call, CommonOptions, MechanismOutput
from linattn.mechanisms.common.linear import WideLinear
from linattn.mechanisms.common.tokens import with_mean_eps
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.maps import NormPower, SignPower
from linattn.ops.shared.call import check_choice, check_number, compute_dtype

ANGLES = ("hard", "direction", "raw", "scaled")


@register_mechanism("nala", paper="arXiv:2506.21137", year=2025)
class Nala(WideLinear):
    """Linear attention whose weights grow sharper with the norm of the query.

    ``o_t = sum_s phi(q_t).psi(k_s) v_s / (sum_s phi(q_t).psi(k_s) + 1e-6 n)``

    ``phi(q) = |d(q)|^p [cos f(q), sin f(q)]``, ``psi(k) = |k|^power [cos f(k), sin f(k)]`` channel by channel, with
    ``d(x) = x / |x|``, ``p = power (tau + tanh |q|)`` and an angle f in [-pi/4, pi/4], so that channels of opposite
    sign count less and no weight is negative. n is the number of keys, or 1 when causal. q ``(B, H, T, D)``, k and v
    ``(B, H_kv, T, D)``, output ``(B, H, T, D)``. Nothing is learned. The powers leave the range of fp16, so the
    features of fp16 inputs are fp32.

    Paper: NaLaFormer, Norm x Direction. State per kv head: ``2 D (D + 1)`` numbers.

    Args:
        power: exponent of the keys, and factor in the exponent of the queries.
        tau: added to tanh; the queries' exponent lies between ``power tau`` and ``power (tau + 1)``.
        angle: the angle f. ``"hard"``, as in the paper's code: ``pi/4 sign(x)``; channels of opposite sign then do not
            meet at all, and the features are ``[relu(x)^p, relu(-x)^p]``. Else ``pi/4 tanh(y)`` with y = d(x)
            (``"direction"``, the paper's text, with hardly any effect for large D), y = x (``"raw"``) or
            y = ``sqrt(D) d(x)`` (``"scaled"``).

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
            check_number(name, value, above=0)
        check_choice("angle", angle, ANGLES)
        self.power, self.tau, self.angle = float(power), float(tau), angle

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        dtype = compute_dtype(q)
        power, tau = (torch.full((), number, dtype=dtype, device=q.device) for number in (self.power, self.tau))
        map_k = SignPower(power, self.head_dim, self.angle)
        map_q, eps = with_mean_eps(NormPower(power, tau, self.head_dim, self.angle), q, k, call, causal=self.causal)
        return self.linear(call, {"q": q, "k": k, "v": v, "feature_map": (map_q, map_k), "eps": eps})

    @property
    def num_features(self) -> int:
        return 2 * self.head_dim
