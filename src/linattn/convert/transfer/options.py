"""Options for training the cores of converted layers, and what each layer learned."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from linattn.convert.training.setting import StageOptions
from linattn.support.checks import check_integer, check_number
from linattn.support.options import check_option

Loss = Literal["mse", "cross_entropy"]


@dataclass(frozen=True, kw_only=True)
class TransferOptions(StageOptions):
    """Options for training the cores of converted layers.

    Example:
        >>> TransferOptions(loss="l1").check()
        Traceback (most recent call last):
        linattn.support.options.OptionError: loss: must be one of mse, cross_entropy, got 'l1'
    """

    loss: Loss = "mse"
    """``"mse"`` of the heads' outputs, or ``"cross_entropy"`` of attention rows: T^2 memory, no gate in the core."""
    scale_factor: float = 10.0
    """Factor of the learning rate for scales that are learned as logarithms (``log_weight``, ``log_alpha``): each of
    them moves a whole head, and may have orders of magnitude to go."""
    layers_per_round: int | None = None
    """Layers that learn at the same time; the teacher stops after the last of them. None: all."""

    def check(self) -> None:
        super().check()
        check_option("loss", self.loss, get_args(Loss))
        check_number("scale_factor", self.scale_factor, above=0)
        if self.layers_per_round is not None:
            check_integer("layers_per_round", self.layers_per_round, 1)


@dataclass(frozen=True)
class LayerCurve:
    """How a layer learned.

    Attributes:
        before, after: the share of the teacher's output that is missed, on held-out text if there is any; else the
            first loss and the mean of the last tenth of the losses.
        losses: training loss of each step.
    """

    layer: int
    before: float
    after: float
    losses: list[float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
