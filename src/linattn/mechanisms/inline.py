"""InLine attention: normalised by a difference instead of a quotient."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from linattn.mechanisms.common.linear import Centred
from linattn.mechanisms.registry import register_mechanism


@register_mechanism("inline", paper="arXiv:2412.06590", year=2024)
class Inline(Centred):
    """Linear attention without features, whose weights are made to sum to 1 by subtraction instead of division.

    ``o_t = sum_s w_ts v_s``, ``w_ts = (z_ts - mean_s z_ts + 1) / N_t``, ``z_ts = q_t.k_s / sqrt(D)``

    Sum and mean run over the N_t visible keys. Different queries have different weights (the map is injective), and
    weights may be negative. When causal, the mean over the past is computed exactly from running sums of the keys.
    q ``(B, H, T, D)``, k and v ``(B, H_kv, T, D)``, output ``(B, H, T, D)``. The paper's local residual is left
    out: a 3 x 3 convolution of v whose kernels are computed for each sample from the mean of x. The layer's ``local``
    is a depthwise convolution too, but its kernels are learned and the same for all samples.

    Paper: Han et al., Bridging the Divide: Reconsidering Softmax and Linear Attention. State per kv head:
    ``(D + 1)^2`` numbers.

    Example:
        >>> import torch
        >>> from linattn import create_mechanism
        >>> mechanism = create_mechanism("inline", num_heads=2, head_dim=8)
        >>> q, k = torch.randn(2, 1, 2, 5, 8).unbind()
        >>> torch.allclose(mechanism(q, k, torch.ones(1, 2, 5, 8)), torch.ones(1, 2, 5, 8), atol=1e-5)
        True
    """

    # The mean of turned keys is taken of the turned keys, so the weights still sum to 1.
    rotates: ClassVar[Literal["inputs"]] = "inputs"

    def features(self, x: Tensor) -> Tensor:
        return x

    def gain_and_total(self, mean_score: Tensor) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(mean_score)
        return one, one
