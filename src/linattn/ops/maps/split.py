"""Maps that keep both signs: the positive and the negative part of every channel, in two flows.

Flow 0 multiplies parts of equal sign. If one side is *opposite*, its two parts are exchanged in flow 1, which then
multiplies parts of opposite sign.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.maps.base import Twin, WideMap, rows, with_groups

# exp(32)^2 times a billion terms is still finite in fp32.
LARGEST_EXPONENT = 32.0


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
