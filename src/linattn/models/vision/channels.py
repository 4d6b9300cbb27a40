"""Maps over the channels of a plane ``(B, C, H, W)``."""

from torch import Tensor, nn

from linattn.layers.norms import EPS


class PlaneNorm(nn.LayerNorm):
    """LayerNorm over the channels of ``(B, C, H, W)``."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class PlaneLinear(nn.Linear):
    """A linear map of the channels of ``(B, C, H, W)``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)
