"""Maps of pairs of neighbouring channels."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from linattn.ops.maps.base import Twin, WideMap, rows, with_groups


@dataclass(frozen=True, eq=False)
class PairRelu(WideMap):
    """ReLU after a 2 x 2 matrix per pair of channels: ``max(own x_c + other x_c', 0)``, c and c' the pair's channels.

    own and other are ``(1 or B, H or H_kv, D)``; the query heads of a group may share them.
    """

    own: Tensor
    other: Tensor

    @property
    def steep(self) -> bool:
        return False

    def wide(self, x: Tensor) -> Tensor:
        x = with_groups(x, self.own.shape[1])
        crossed = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        own, other = (m.to(x.dtype)[:, :, None, None] for m in (self.own, self.other))
        return F.relu(own * x + other * crossed).flatten(1, 2)

    def num_features(self, head_dim: int) -> int:
        return head_dim

    def twin(self) -> Twin:
        return Twin("pair_relu", 1, table=rows(self.own, self.other))
