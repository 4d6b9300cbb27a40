"""Base of mechanisms whose features are powers, squares or exponentials and need the range of fp32."""

from typing import Any

import torch
from torch import Tensor

from linattn.mechanisms.base import Call, LinearBase, MechanismOutput
from linattn.ops.shared.call import compute_dtype
from linattn.ops.shared.checks import autocast_dtype


def wide(x: Tensor) -> Tensor:
    """``x`` in fp32, or in fp64 if it is fp64: the precision for inputs of a steep map."""
    return x.to(compute_dtype(x))


class WideLinear(LinearBase):
    """Base of linear mechanisms whose features have the range of fp32; the output still has the dtype of v."""

    def feature_dtype(self, v: Tensor) -> torch.dtype:
        """fp32 for fp16, which ends at 65504, less than the third power of 41; bf16 has the range of fp32 and stays."""
        return torch.float32 if v.dtype == torch.float16 else v.dtype

    def linear(self, call: Call, arguments: dict[str, Any]) -> MechanismOutput:
        v: Tensor = arguments["v"]
        dtype = self.feature_dtype(v)
        cast = {name: x.to(dtype) for name, x in arguments.items() if isinstance(x, Tensor)}
        out = super().linear(call, arguments | cast)
        if autocast_dtype(v) is not None:  # the output has autocast's dtype already
            return out
        return MechanismOutput(out.output.to(v.dtype), out.state)
