"""Records of a run on text: one for each evaluation, and the result."""

from dataclasses import asdict, dataclass
from typing import Any

from linattn.lab.train.rounds import DivergedError


@dataclass(frozen=True)
class StepRecord:
    """An evaluation on the test sequences after ``step`` steps."""

    step: int
    lr: float
    """Learning rate of the last step."""
    train_loss: float
    """Mean training loss in nats since the record before."""
    score: float
    """The metric by which models are compared on the task."""
    metrics: dict[str, float]
    """All metrics of the task; ``loss`` is in nats."""
    tokens: int
    """Tokens trained on so far, padding included."""
    seconds: float
    """Time of training alone since the record before; evaluation and files are not counted."""


@dataclass(frozen=True)
class TextResult:
    records: list[StepRecord]
    metric: str
    score: float
    """Score of the last step, not of the best: to pick a step by test data would be a leak."""
    seconds: float
    """Time of training alone over all steps, including those before a resume."""
    graphs: str = ""
    """Whether steps were CUDA graphs: ``replayed``, or ``stopped`` and why; empty if none were wanted."""

    @classmethod
    def of(cls, records: list[StepRecord], metric: str, graphs: str = "") -> "TextResult":
        return cls(list(records), metric, records[-1].score, sum(record.seconds for record in records), graphs)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "TextResult":
        records = [StepRecord(**record) for record in content["records"]]
        return cls.of(records, content["metric"], content.get("graphs", ""))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def tokens_per_second(self) -> float:
        """Training speed over the whole run, including start-up and compilation."""
        return self.records[-1].tokens / max(self.seconds, 1e-9)


class TextDivergedError(DivergedError):
    """The loss is not finite; counts steps instead of epochs."""

    def __init__(self, step: int, lr: float, what: str = "training loss") -> None:
        RuntimeError.__init__(
            self,
            f"the {what} is not finite: step {step}, learning rate {lr:g}. "
            "A lower lr, more warmup_steps or a smaller clip_norm helps; checkpoint and log end before this step",
        )
        self.epoch, self.step, self.lr = 0, step, lr
