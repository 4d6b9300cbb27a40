"""Records of a training run: one for each epoch, and the result."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class EpochRecord:
    """One epoch, counted from 0, with its evaluation on the test split; uses averaged weights if there are any."""

    epoch: int
    lr: float
    """Learning rate of the epoch's last step."""
    train_loss: float
    """Mean over the epoch's training images, with label smoothing and mixing."""
    test_loss: float
    """Plain cross-entropy."""
    top1: float
    """Accuracy on the test images, in percent."""
    seconds: float
    """Time of training alone; evaluation and files are not counted."""


@dataclass(frozen=True)
class TrainResult:
    epochs: list[EpochRecord]
    top1: float
    """Accuracy of the last epoch, not of the best: to pick an epoch by test data would be a leak."""
    seconds: float
    """Time of training alone over all epochs, including those before a resume."""

    @classmethod
    def of(cls, epochs: list[EpochRecord]) -> "TrainResult":
        return cls(list(epochs), epochs[-1].top1, sum(record.seconds for record in epochs))

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "TrainResult":
        return cls.of([EpochRecord(**record) for record in content["epochs"]])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class DivergedError(RuntimeError):
    """The loss is not finite."""

    def __init__(self, epoch: int, step: int, lr: float, what: str = "training loss") -> None:
        super().__init__(
            f"the {what} is not finite: epoch {epoch}, step {step}, learning rate {lr:g}. "
            "A lower lr, more warmup_epochs or a smaller clip_norm helps; checkpoint and log end before this epoch"
        )
        self.epoch, self.step, self.lr = epoch, step, lr
