"""FLatten: features are pulled towards the nearest axes and keep their lengths."""

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mechanisms.base import Call, CommonOptions, LinearBase, MechanismOutput
from linattn.mechanisms.common.tokens import mean_factor
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.maps import ShiftedPower
from linattn.ops.shared.call import check_number, compute_dtype

EPS = 1e-6


@register_mechanism("focused", paper="arXiv:2308.00442", year=2023)
class Focused(LinearBase):
    """Linear attention with ReLU features focused by a power that keeps their length.

    ``o_t = sum_s phi(q_t).phi(k_s) v_s / (sum_s phi(q_t).phi(k_s) + 1e-6 n)``,
    ``phi(x) = |y| y^power / |y^power|``, ``y = (relu(x) + 1e-6) / softplus(scale)``

    The norms run over the channels of all heads together, H heads for q and H_kv heads for k. n is the number of keys,
    or 1 when causal. q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, output ``(B, H, T, D)``. The learned scale
    ``(H_kv, D)`` is shared by q and k and by the query heads of a kv head, and starts at 0. The paper's position
    embedding of k and convolution of v belong to the layer.

    Paper: Han et al., FLatten Transformer. State per kv head: ``D (D + 1)`` numbers.

    Args:
        power: how strongly features are focused; 1 leaves them as they are.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("focused", num_heads=2, head_dim=8)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
        >>> mechanism(q, k, v).shape, mechanism.num_parameters
        (torch.Size([1, 2, 5, 8]), 16)
    """

    def __init__(self, num_heads: int, head_dim: int, *, power: float = 3.0, **common: Unpack[CommonOptions]) -> None:
        super().__init__(num_heads, head_dim, **common)
        check_number("power", power, above=0)
        self.power = float(power)
        self.scale = nn.Parameter(torch.empty(self.num_kv_heads, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> MechanismOutput:
        factor, eps = mean_factor(q, k, call, causal=self.causal)
        maps = (self.map_for(q, factor), self.map_for(k))
        return self.linear(call, {"q": q, "k": k, "v": v, "feature_map": maps, "eps": eps})

    def features(self, x: Tensor) -> Tensor:
        """``phi(x)`` for x ``(B, H or H_kv, T, D)``, of the same shape, in fp32 or fp64."""
        return self.map_for(x).wide(x.to(compute_dtype(x)))

    def map_for(self, x: Tensor, factor: Tensor | None = None) -> ShiftedPower:
        """phi as a map for the tokens x only: it holds their lengths over all heads and a factor ``(1 or B, 1, T)``."""
        dtype = compute_dtype(x)
        scale = F.softplus(self.scale.to(dtype))
        y = (F.relu(x.to(dtype)) + EPS).unflatten(1, (self.num_kv_heads, -1)) / scale[:, None, None]
        length = torch.linalg.vector_norm(y, dim=(1, 2, 4))[:, None]  # (B, 1, T), never 0, since y is not
        focused = (y / length[:, :, None, :, None]).pow(self.power)  # the power of a long vector would overflow
        size = length / torch.linalg.vector_norm(focused, dim=(1, 2, 4))[:, None]
        size = size if factor is None else size * factor
        return ShiftedPower(self.power, scale.pow(-self.power), 1 / length, size)

    def truncated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k
