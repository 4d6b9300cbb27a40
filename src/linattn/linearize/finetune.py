"""Stage 2: the projections around the converted attention get used to it, through low-rank adapters.

The teacher is the same model: softmax in the place of the cores, and the adapters switched off.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from linattn.linearize.attention import linearized_layers
from linattn.linearize.losses import answer_divergence, answer_of, hidden_distance, next_token_loss
from linattn.linearize.low_rank import Adapted, adapted_model
from linattn.linearize.stage_run import StageRun, weights_digest
from linattn.linearize.stages import Batch, Batches, Report, Setting, StageOptions, call
from linattn.linearize.transfer_round import in_eval
from linattn.support.extras import need
from linattn.support.options import OptionError, check_option
from linattn.train.checkpoint import model_digest
from linattn.train.checks import check_integer, check_number

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

Objective = Literal["distill", "next_token", "mix"]


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(StageOptions):
    """How the low-rank adapters are trained.

    Example:
        >>> FinetuneOptions(rank=0).check()
        Traceback (most recent call last):
        linattn.support.options.OptionError: rank: must be an integer of at least 1, got 0
    """

    steps: int = 100
    lr: float = 5e-4
    rank: int = 8
    alpha: float = 16.0
    """Adapters count ``alpha / rank`` times."""
    targets: tuple[str, ...] | None = None
    """Names of the projections that get adapters; None: those of the attention, as the family's adapter names them."""
    objective: Objective = "distill"
    """``"distill"``: the teacher's distribution over tokens (an encoder without a head: its last hidden states);
    ``"next_token"``: the text itself; ``"mix"``: both."""
    distill_weight: float = 0.5
    """Of the teacher in ``"mix"``."""
    train_cores: bool = False
    """Train what stage 1 has trained too, with the same rate."""
    accumulation: int = 1
    """Parts that a step's sequences are computed in, one after another: less memory, the same step."""

    def check(self) -> None:
        super().check()
        check_integer("rank", self.rank, 1)
        check_number("alpha", self.alpha, above=0)
        check_option("objective", self.objective, get_args(Objective))
        check_number("distill_weight", self.distill_weight, least=0, most=1)
        check_integer("accumulation", self.accumulation, 1)
        if self.batch_size % self.accumulation:
            raise OptionError("accumulation", f"must divide batch_size = {self.batch_size}, got {self.accumulation}")

    def fingerprint(self) -> dict[str, Any]:
        found = super().fingerprint()
        return found | {"targets": None if self.targets is None else list(self.targets)}


@dataclass(frozen=True)
class FinetuneResult:
    """``losses`` of each step; ``parameters`` that were trained."""

    losses: list[float]
    parameters: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def finetune(
    model: nn.Module,
    batches: Batches,
    options: FinetuneOptions | None = None,
    folder: Path | None = None,
    *,
    progress: Report | None = None,
    accelerator: "Accelerator | None" = None,
) -> FinetuneResult:
    """Train adapters on a converted model and merge them: afterwards it is the plain converted model, with new weights.

    If it is interrupted the adapters are taken off again, and the model is what it was before. A run that was stopped
    and started again, from the same model, ends in the same weights.

    Args: as for ``linattn.linearize.transfer.transfer``.

    Raises: as there.
    """
    need("fine-tuning", "peft")
    options = options or FinetuneOptions()
    options.check()
    if not linearized_layers(model):
        raise ValueError("the model has no converted layers: call linattn.linearize.convert.convert first")
    setting = Setting.of(model, batches, folder, accelerator, progress)
    identity = {"model": model_digest(model), "weights": weights_digest(model)}
    with (
        in_eval(model),
        adapted_model(
            model, rank=options.rank, alpha=options.alpha, targets=options.targets, train_cores=options.train_cores,
            seed=options.seed,
        ) as adapted,
    ):  # fmt: skip
        result = FinetuneResult(**_Finetuning(model, adapted, options, setting).go(identity))
        adapted.merge()
    return result


class _Finetuning(StageRun):
    """All adapters are one part."""

    options: FinetuneOptions

    def __init__(self, model: nn.Module, adapted: Adapted, options: FinetuneOptions, setting: Setting) -> None:
        super().__init__({"adapters": nn.ParameterList(adapted.parameters())}, options, setting, 1)
        self.model, self.adapted = model, adapted

    def step(self) -> Tensor:
        total = torch.zeros((), device=self.setting.device)
        for part in pieces(self.setting.batch(self.done), self.options.accumulation):
            loss = self._loss(part) / self.options.accumulation
            loss.backward()
            total += loss.detach()
        self.update("adapters")
        return total[None]

    def _loss(self, batch: Batch) -> Tensor:
        options, mask = self.options, batch.get("attention_mask")
        weight = {"distill": 1.0, "next_token": 0.0, "mix": options.distill_weight}[options.objective]
        if weight > 0:
            with self.adapted.as_teacher():
                teacher, _ = answer_of(call(self.model, batch))
        student, is_logits = answer_of(call(self.model, batch))
        loss = torch.zeros((), device=student.device)
        if weight < 1:
            if not is_logits or "input_ids" not in batch:
                raise OptionError("objective", "next_token needs a language model with logits; use distill")
            loss = loss + (1 - weight) * next_token_loss(student, batch["input_ids"], mask)
        if weight > 0:
            distance = answer_divergence if is_logits else hidden_distance
            loss = loss + weight * distance(student, teacher, mask)
        return loss

    def words(self, losses: Sequence[float]) -> str:
        return f"loss {losses[0]:.4f}"

    def result(self) -> dict[str, Any]:
        trained = sum(parameter.numel() for parameter in self.parts.parameters())
        return {"losses": self.readings.columns()[0], "parameters": trained}


def pieces(batch: Batch, count: int) -> Iterator[Batch]:
    """A batch in ``count`` parts of equally many rows."""
    rows = len(next(iter(batch.values())))
    if rows % count:
        raise OptionError("accumulation", f"must divide the {rows} rows of a batch, got {count}")
    for first in range(0, rows, rows // count):
        yield {name: value[first : first + rows // count] for name, value in batch.items()}
