"""Mechanisms whose features are powers, squares or exponentials: they keep fp32's range in every precision."""

from typing import Any

import torch
from torch import Tensor

from linattn.mechanisms.base import Call, LinearBase, MechanismOutput
from linattn.ops.checks import autocast_dtype
from linattn.ops.packing import compute_dtype


def wide(x: Tensor) -> Tensor:
    """``x`` in fp32, or fp64 as it is: for what comes before a steep map."""
    return x.to(compute_dtype(x))


class WideLinear(LinearBase):
    """A linear mechanism that hands over features of fp32's range; the output has the dtype of v all the same."""

    def feature_dtype(self, v: Tensor) -> torch.dtype:
        """bf16 has the range of fp32 and stays; fp16 ends at 65504, which a third power of 41 exceeds."""
        return torch.float32 if v.dtype == torch.float16 else v.dtype

    def linear(self, call: Call, arguments: dict[str, Any]) -> MechanismOutput:
        v: Tensor = arguments["v"]
        dtype = self.feature_dtype(v)
        cast = {name: x.to(dtype) for name, x in arguments.items() if isinstance(x, Tensor)}
        out = super().linear(call, arguments | cast)
        if autocast_dtype(v) is not None:  # the algebra has chosen autocast's dtype
            return out
        return MechanismOutput(out.output.to(v.dtype), out.state)
