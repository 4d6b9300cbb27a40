"""A feature map as a kernel of its own, for calls whose attention kernel does not run it."""

import torch
from torch import Tensor

from linattn.kernels.common.support import MAP_CODES
from linattn.kernels.maps.library import map_directly
from linattn.ops.maps import Twin

# Maps whose features leave the range of fp16: for fp16 inputs they are fp32.
STEEP = ("split_power", "norm_power", "sign_power", "split_expm1", "squares", "squares_and_linear", "shifted_power")


def map_features(x: Tensor, twin: Twin) -> Tensor:
    """Features ``(B, H flows, T, parts D [+ 1])`` of ``x (B, H, T, D)``, contiguous, in x's dtype.

    Differentiable in x and in the twin's table, factors and constant. Flow f of head h stands at ``h flows + f``, a
    constant in the last column.
    """
    dtype = torch.float32 if x.dtype == torch.float16 and twin.name in STEEP else x.dtype
    return map_directly(x, twin.table, twin.token, twin.constant, MAP_CODES[twin.name], twin.parts, twin.flows, dtype)
