"""What reflections are given and return, for the op and its kernels."""

from typing import NamedTuple

from torch import Tensor

# Far below any |w|^2 in training. With a smaller |w|^2 the result, divided by this bound, is not a reflection any more.
SMALLEST_SQUARE = 1e-12
EPS = 1e-6  # added to a variance before its logarithm is taken


class Modulation(NamedTuple):
    """Parameters ``(H_kv, D/2)`` of a change of angles: pi/2 tanh(amplitude) tanh(gain log(var + eps) + bias)."""

    amplitude: Tensor
    gain: Tensor
    bias: Tensor


class Reflected(NamedTuple):
    """q and k after the reflections, and the variances ``(B, H_kv, 1, D/2)`` over their tokens, or None."""

    q: Tensor
    k: Tensor
    variance: Tensor | None
