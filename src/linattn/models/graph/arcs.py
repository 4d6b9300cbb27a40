"""Functions of geodesics that stay smooth, with finite gradients, where the kind of the geodesic changes.

In terms of a geodesic's signed squared length z, the circle (z < 0) and the hyperbola (z > 0) are one analytic
function. The usual formulas with ``sqrt(abs(z))`` have no gradient at 0, so near 0 the power series is used instead.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_NEAR = 1e-2  # the series is used below this: its first omitted term is under 1e-16
_COSINE = [1 / math.factorial(2 * n) for n in range(7)]
_SINE = [1 / math.factorial(2 * n + 1) for n in range(7)]
_ARC = [(-2.0) ** n * math.factorial(n) ** 2 / math.factorial(2 * n + 1) for n in range(10)]


def cosine_and_sine(z: Tensor) -> tuple[Tensor, Tensor]:
    """``(cosh s, sinh s / s)``, ``s = sqrt(z)``, for z > 0; ``(cos s, sin s / s)``, ``s = sqrt(-z)``, for z < 0."""
    near = z.abs() < _NEAR
    small = torch.where(near, z, 0)
    s = torch.where(near, 1, z).abs().sqrt()  # 1: the branch that where() does not take must have a finite gradient too
    up = torch.where(z > 0, s, 1)
    cosine = torch.where(z > 0, up.cosh(), s.cos())
    sine = torch.where(z > 0, up.sinh() / up, s.sin() / s)
    return torch.where(near, _series(_COSINE, small), cosine), torch.where(near, _series(_SINE, small), sine)


def arc_over_sine(delta: Tensor) -> Tensor:
    """``arccosh(c) / sqrt(c^2 - 1)``, ``c = 1 + delta``; for c < 1 ``arccos(c) / sqrt(1 - c^2)``, NaN for c <= -1."""
    near = delta.abs() < _NEAR
    small = torch.where(near, delta, 0)
    up, down = torch.where(delta > _NEAR, delta, 1), torch.where((delta < -_NEAR) & (delta > -2), delta, -1)
    above = torch.acosh(1 + up) / (up * (up + 2)).sqrt()
    below = torch.acos(1 + down) / (-down * (down + 2)).sqrt()
    far = torch.where(delta > 0, above, torch.where(delta > -2, below, torch.nan))
    return torch.where(near, _series(_ARC, small), far)


def arc(delta: Tensor) -> Tensor:
    """The length of a geodesic, ``arccosh(c)``, or ``arccos(c)`` for c < 1, with ``c = 1 + delta > -1``.

    Computed by half angles, ``2 arsinh(sqrt(delta / 2))`` and ``2 arcsin(sqrt(-delta / 2))``, which lose no precision
    near c = 1. Below arcs of 1e-5 (fp32) the gradient of the root would grow without bound, so a straight line replaces
    it.
    """
    eps = torch.finfo(delta.dtype).eps
    tiny = eps**1.5
    half = delta.abs() / 2
    root = torch.where(half > tiny, half.clamp(min=tiny).sqrt(), half / math.sqrt(tiny))
    # The arcsine has no gradient at 1 either, which is c = -1, the edge of what geodesics reach.
    return 2 * torch.where(delta > 0, root.asinh(), root.clamp(max=1 - eps).asin())


def _series(coefficients: Sequence[float], z: Tensor) -> Tensor:
    total = torch.full_like(z, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * z + coefficient
    return total
