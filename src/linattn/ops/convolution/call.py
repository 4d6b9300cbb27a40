"""The arguments of one call of the short convolution, checked together before any work is done."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from linattn.ops.shared import call as checks
from linattn.ops.shared.call import num_sequences

Activation = Literal["silu"] | None
ACTIVATIONS = ("silu", None)


class ConvolutionState(NamedTuple):
    """State of a short convolution of width W: its last W-1 real inputs.

    ``inputs (B, W-1, C)``, oldest first, in the dtype of x, with zeros where the sequence is shorter. With
    ``cu_seqlens`` B counts sequences.
    """

    inputs: Tensor


@dataclass(frozen=True)
class ConvolutionCall:
    """The arguments of ``short_convolution``, and a state."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: bool = False
    activation: Activation = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    validate: bool | None = None
    initial_state: ConvolutionState | None = None

    @property
    def is_step(self) -> bool:
        """Whether the call is one token of decoding."""
        return self.x.shape[1] == 1 and self.key_mask is None and self.cu_seqlens is None

    def check(self) -> None:
        """Raise TypeError or ValueError that names the argument and what is allowed."""
        x, weight = self.x, self.weight
        checks.check_tensor("x", x, "(B, T, C)", 3)
        checks.check_tensor("weight", weight, "(C, W)", 2)
        checks.check_size("weight", "number of channels", weight.shape[0], x.shape[2], "x")
        if weight.shape[1] < 1:
            raise ValueError(f"weight must have a width W >= 1, got shape {tuple(weight.shape)}")
        if self.bias is not None:
            checks.check_tensor("bias", self.bias, "(C,)", 1)
            checks.check_shape("bias", self.bias, (x.shape[2],))
        checks.check_same("x", x, weight=weight, bias=self.bias)
        checks.check_choice("activation", self.activation, ACTIVATIONS)
        checks.check_flag("residual", self.residual)
        checks.check_layout(self.key_mask, self.cu_seqlens, x.shape[0], x.shape[1], x, self.validate, "x")
        checks.check_state(self.initial_state, ConvolutionState, {"inputs": self._state_shape()}, x)

    def initial_inputs(self, dtype: torch.dtype) -> Tensor:
        """The inputs before the first token, ``(N, W-1, C)``."""
        if self.initial_state is not None:
            return self.initial_state.inputs.to(dtype)
        return torch.zeros(self._state_shape(), dtype=dtype, device=self.x.device)

    def _state_shape(self) -> tuple[int, int, int]:
        return num_sequences(self.x, self.cu_seqlens), self.weight.shape[1] - 1, self.x.shape[2]
