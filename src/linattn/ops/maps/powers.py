"""Maps that take powers of channels: of their share in the vector's length, of their size, or shifted above 0."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.maps.base import Twin, WideMap, rows, with_groups
from linattn.ops.shared.call import compute_dtype

Angle = Literal["hard", "direction", "raw", "scaled"]
SHIFT = 1e-6
# Lengths are sqrt(|x|^2 + SMALLEST^2): no vector of usual size changes, and 0 has a direction (0) and a gradient.
SMALLEST = 1e-6


def length_of(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """``|x|`` over ``dim``, which is kept with size 1, in fp32 or fp64."""
    return (x.to(compute_dtype(x)).square().sum(dim, keepdim=True) + SMALLEST**2).sqrt()


def direction_of(x: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """``x / |x|`` over ``dim``, in fp32 or fp64; 0 at 0."""
    x = x.to(compute_dtype(x))
    return x * (x.square().sum(dim, keepdim=True) + SMALLEST**2).rsqrt()  # a quotient has a longer gradient


def power_of(base: Tensor, exponent: Tensor) -> Tensor:
    """``base^exponent`` for ``base >= 0``; 0 with gradients 0 at base 0, where exponents below 1 would have a pole."""
    positive = base > 0
    return torch.where(positive, torch.where(positive, base, 1).pow(exponent), 0)


def with_angles(size: Tensor, x: Tensor, angle: Angle) -> Tensor:
    """``size [cos f(x), sin f(x)]``: ``(.., D) -> (.., 2D)``, f in [-pi/4, pi/4].

    The ``"hard"`` angle ``f = pi/4 sign(x)`` is computed with each pair rotated by pi/4, which keeps all products and
    makes one feature of the pair 0.
    """
    if angle == "hard":
        return torch.cat([size * (x > 0), size * (x < 0)], dim=-1)
    y = x if angle == "raw" else direction_of(x)
    f = math.pi / 4 * (y * x.shape[-1] ** 0.5 if angle == "scaled" else y).tanh()
    return torch.cat([size * f.cos(), size * f.sin()], dim=-1)


@dataclass(frozen=True, eq=False)
class NormPower(WideMap):
    """``(|x_c| / |x|)^p`` with ``p = power (tau + tanh |x|)``, sharper for longer x; separated by sign or by an angle.

    power and tau are tensors ``()`` without a gradient, head_dim is the width of x; for the angle see ``with_angles``.
    """

    power: Tensor
    tau: Tensor
    head_dim: int
    angle: Angle = "hard"
    parts = 2

    def wide(self, x: Tensor) -> Tensor:
        exponent = self.power * (self.tau + length_of(x).tanh())
        return with_angles(power_of(direction_of(x).abs(), exponent), x, self.angle)

    def twin(self) -> Twin | None:
        return (
            None if self.angle != "hard" else Twin("norm_power", 2, table=_table(self.power, self.tau, self.head_dim))
        )


@dataclass(frozen=True, eq=False)
class SignPower(WideMap):
    """``|x_c|^power``, separated by sign or by an angle; power is a tensor ``()`` without a gradient."""

    power: Tensor
    head_dim: int
    angle: Angle = "hard"
    parts = 2

    def wide(self, x: Tensor) -> Tensor:
        return with_angles(power_of(x.abs(), self.power), x, self.angle)

    def twin(self) -> Twin | None:
        if self.angle != "hard":
            return None
        return Twin("sign_power", 2, table=_table(self.power, torch.zeros_like(self.power), self.head_dim))


@dataclass(frozen=True, eq=False)
class ShiftedPower(WideMap):
    """``outer factor (inner (max(x, 0) + 1e-6))^power``.

    factor is ``(H or H_kv, D)``; inner and outer are numbers > 0 per token, ``(1 or B, 1, T)``. With inner near 1/|x|
    the power stays in range.
    """

    power: float
    factor: Tensor
    inner: Tensor
    outer: Tensor

    def wide(self, x: Tensor) -> Tensor:
        base = with_groups((F.relu(x) + SHIFT) * self.inner.unsqueeze(-1), self.factor.shape[0])
        return (base.pow(self.power) * self.factor[:, None, None]).flatten(1, 2) * self.outer.unsqueeze(-1)

    def twin(self) -> Twin | None:
        if self.power < 1:  # a root of outer would be a power, and might leave the range
            return None
        table = rows(self.factor, torch.full_like(self.factor, self.power)).unsqueeze(0)
        return Twin("shifted_power", 1, table=table, token=(self.inner * self.outer.pow(1 / self.power)).float())


def _table(a: Tensor, b: Tensor, head_dim: int) -> Tensor:
    """The table ``(1, 1, 2, 2D)`` that repeats two numbers for all features, contiguous for forward and backward."""
    return torch.stack([a, b]).float()[None, None, :, None].expand(1, 1, 2, 2 * head_dim).contiguous()
