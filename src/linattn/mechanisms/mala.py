"""MALA: linear attention that keeps the magnitude of the query."""

from torch import Tensor

from linattn.mechanisms.common.linear import Centred
from linattn.mechanisms.registry import register_mechanism
from linattn.ops.maps import EluPlusOne

EPS = 1e-6


@register_mechanism("mala", paper="arXiv:2507.00698", year=2025)
class Mala(Centred):
    """Linear attention whose weights sum to 1 and still sharpen as the query grows.

    ``o_t = sum_s w_ts v_s``, ``w_ts = ((1 + 1/(m_t + 1e-6)) z_ts - m_t) / N_t``,
    ``z_ts = phi(q_t).phi(k_s) / sqrt(D)``, ``m_t = mean_s z_ts``, ``phi(x) = elu(x) + 1``

    Sum and mean run over the N_t visible keys. Division by the row sum would cancel the length of ``phi(q_t)``; here it
    remains. When causal, the mean over the past is computed exactly from running sums of the keys' features.
    q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, output ``(B, H, T, D)``. The paper's rotary positions, local branch
    and gate belong to the layer; its ``rotate`` turns z in the weights but not m.

    Paper: Fan et al., Rectifying Magnitude Neglect in Linear Attention. State per kv head: ``(D + 1)^2`` numbers.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("mala", num_heads=2, head_dim=8)
        >>> q, k = torch.randn(2, 1, 2, 5, 8).unbind()
        >>> torch.allclose(mechanism(q, k, torch.ones(1, 2, 5, 8)), torch.ones(1, 2, 5, 8), atol=1e-5)
        True
    """

    def features(self, x: Tensor) -> Tensor:
        return EluPlusOne()(x)

    def gain_and_total(self, mean_score: Tensor) -> tuple[Tensor, Tensor]:
        inverse = 1 / (mean_score + EPS)
        return 1 + inverse, mean_score * inverse
