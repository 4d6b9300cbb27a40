"""Stage 2: low-rank adapters let the projections adjust to the converted attention around them.

The teacher is the same model with softmax in place of the cores and the adapters switched off.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linattn.convert.finetune.low_rank import Adapted, adapted_model
from linattn.convert.finetune.options import FinetuneOptions
from linattn.convert.layer.attention import linearized_layers
from linattn.convert.training.loop import StageRun, groups_with_scales, weights_digest
from linattn.convert.training.losses import (
    answer_divergence,
    answer_of,
    hidden_distance,
    next_token_loss,
    relative_squares,
)
from linattn.convert.training.modes import in_eval
from linattn.convert.training.setting import Batch, Batches, Report, Setting, call
from linattn.support.checkpoint import model_digest
from linattn.support.extras import need
from linattn.support.options import OptionError

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


@dataclass(frozen=True)
class FinetuneResult:
    """Losses of each step, and the number of ``parameters`` that were trained."""

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
    """Train adapters on a converted model and merge them, which leaves a plain converted model with new weights.

    If it is interrupted, the adapters are removed and the model is what it was before. A run that was stopped and
    started again, from the same model, ends in the same weights.

    Args and exceptions are those of ``linattn.convert.transfer.transfer``.
    """
    need("fine-tuning", "peft")
    options = options or FinetuneOptions()
    options.check()
    if not linearized_layers(model):
        raise ValueError("the model has no converted layers: call linattn.convert.convert.convert first")
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
    """The loop of this stage; all adapters together are one part."""

    options: FinetuneOptions

    def __init__(self, model: nn.Module, adapted: Adapted, options: FinetuneOptions, setting: Setting) -> None:
        self.model, self.adapted = model, adapted
        super().__init__({"adapters": nn.ParameterList(adapted.parameters())}, options, setting, 1)

    def groups(self, part: nn.Module) -> list[dict[str, Any]]:
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        return groups_with_scales(trained.items(), self.options.scale_factor)

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
        more = {"output_hidden_states": True} if options.hidden_weight else {}
        if weight > 0:
            with self.adapted.as_teacher():
                taught = call(self.model, batch, **more)
        output = call(self.model, batch, **more)
        student, is_logits = answer_of(output)
        loss = torch.zeros((), device=student.device)
        if weight < 1:
            if not is_logits or "input_ids" not in batch:
                raise OptionError("objective", "next_token needs a language model with logits; use distill")
            loss = loss + (1 - weight) * next_token_loss(student, batch["input_ids"], mask)
        if weight > 0:
            teacher, _ = answer_of(taught)
            if is_logits:
                loss = loss + weight * answer_divergence(student, teacher, mask)
            else:
                loss = loss + weight * hidden_distance(student, teacher, mask, options.pooled_weight)
        if more:  # the first hidden states are the embeddings, which student and teacher share
            pairs = zip(output.hidden_states[1:], taught.hidden_states[1:], strict=True)
            squares = [relative_squares(*pair, mask) for pair in pairs]
            loss = loss + options.hidden_weight * torch.stack(squares).mean()
        return loss

    def words(self, losses: Sequence[float]) -> str:
        return f"loss {losses[0]:.4f}"

    def result(self) -> dict[str, Any]:
        trained = sum(parameter.numel() for parameter in self.parts.parameters())
        return {"losses": self.readings.columns()[0], "parameters": trained}


def pieces(batch: Batch, count: int) -> Iterator[Batch]:
    """Split a batch into ``count`` parts with equally many rows."""
    rows = len(next(iter(batch.values())))
    if rows % count:
        raise OptionError("accumulation", f"must divide the {rows} rows of a batch, got {count}")
    for first in range(0, rows, rows // count):
        yield {name: value[first : first + rows // count] for name, value in batch.items()}
