"""Maps that take powers or exponentials of channels.

Some keep both signs, the positive and the negative part of every channel, in two flows. Flow 0 multiplies parts of
equal sign. If one side is *opposite*, its two parts are exchanged in flow 1, which then multiplies parts of opposite
sign.
"""

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
# exp(32)^2 times a billion terms is still finite in fp32.
LARGEST_EXPONENT = 32.0


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
        return _power_twin("norm_power", self.power, self.tau, self)


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
        return _power_twin("sign_power", self.power, torch.zeros_like(self.power), self)


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


def _power_twin(name: str, power: Tensor, tau: Tensor, given: NormPower | SignPower) -> Twin | None:
    """The twin whose table repeats two numbers for all features, contiguous for forward and backward."""
    if given.angle != "hard":
        return None
    table = torch.stack([power, tau]).float()[None, None, :, None].expand(1, 1, 2, 2 * given.head_dim)
    return Twin(name, 2, table=table.contiguous())


def split_signs(x: Tensor) -> Tensor:
    """``[relu(x), relu(-x)]``: ``(..., D) -> (..., 2D)``."""
    return torch.cat([F.relu(x), F.relu(-x)], dim=-1)


def swap_halves(x: Tensor) -> Tensor:
    """``[a, b] -> [b, a]`` on the last axis."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([b, a], dim=-1)


def _as_flows(same: Tensor, second: Tensor, dim: int) -> Tensor:
    """Interleave two flows: flow f of head h becomes virtual head ``2h + f``."""
    return torch.stack([same, second], dim=dim + 1).flatten(dim, dim + 1)


@dataclass(frozen=True, eq=False)
class SplitPower(WideMap):
    """``[relu(factor x)^power, relu(-factor x)^power]`` in both flows; the gradients at x = 0 are 0.

    power and factor > 0 are ``(H or H_kv, D)``; the query heads of a group may share them.
    """

    power: Tensor
    factor: Tensor
    opposite: bool = False

    flows, parts = 2, 2

    def wide(self, x: Tensor) -> Tensor:
        same = self.one_flow(x)
        return _as_flows(same, swap_halves(same) if self.opposite else same, 1)

    def one_flow(self, x: Tensor) -> Tensor:
        """``(B, H, T, D) -> (B, H, T, 2D)``: flow 0."""
        heads = with_groups(x, self.power.shape[0]) * self.factor[:, None, None]
        return split_signs(heads).pow(self.power.repeat(1, 2)[:, None, None]).flatten(1, 2)

    def twin(self) -> Twin:
        power, factor = self.power.repeat(1, 2), self.factor.repeat(1, 2)
        second = rows(power, -factor if self.opposite else factor)
        return Twin("split_power", 2, flows=2, table=_as_flows(rows(power, factor), second, 0).unsqueeze(0))


@dataclass(frozen=True, eq=False)
class SplitExpm1(WideMap):
    """``exp(same [relu(x), relu(-x)]) - 1`` in flow 0, with second (None: same) in flow 1; exponents are at most 32.

    same and second are factors > 0 per feature, ``(heads, 2D)`` with H, H_kv or 1 heads.
    """

    same: Tensor
    second: Tensor | None = None
    opposite: bool = False

    flows, parts = 2, 2

    def wide(self, x: Tensor) -> Tensor:
        parts = split_signs(with_groups(x, self.same.shape[0]))
        same = self._one_flow(parts, self.same)
        if self.second is None and not self.opposite:
            return _as_flows(same, same, 1)
        second = swap_halves(parts) if self.opposite else parts
        return _as_flows(same, self._one_flow(second, self.same if self.second is None else self.second), 1)

    def _one_flow(self, parts: Tensor, factor: Tensor) -> Tensor:
        return (parts * factor[:, None, None]).clamp(max=LARGEST_EXPONENT).expm1().flatten(1, 2)

    def twin(self) -> Twin:
        unused, second = torch.zeros_like(self.same), self.same if self.second is None else self.second
        table = rows(unused, self.same)
        if self.opposite or self.second is not None or table.shape[0] > 1:
            table = _as_flows(table, rows(unused, -second if self.opposite else second), 0)
        return Twin("split_expm1", 2, flows=2, table=table.unsqueeze(0))
