"""Stage 2: low-rank adapters let the projections adjust to the converted attention around them.

The teacher is the same model with softmax in place of the cores and the adapters switched off.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from linattn.convert.layer.attention import linearized_layers, set_mode
from linattn.convert.training.loop import Batch, Batches, StageOptions, StageRun, call, in_eval, in_fp32, weights_digest
from linattn.convert.training.losses import (
    answer_divergence,
    answer_of,
    hidden_distance,
    next_token_loss,
    relative_squares,
)
from linattn.support.checkpoint import model_digest
from linattn.support.config import option
from linattn.support.extras import need
from linattn.support.options import OptionError
from linattn.support.progress import Report

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(StageOptions):
    """Options for training the low-rank adapters.

    ``objective``: ``"distill"`` matches the teacher's distribution over tokens (for an encoder without a head, its last
    hidden states), ``"next_token"`` predicts the text itself, ``"mix"`` does both.

    Example:
        >>> FinetuneOptions(rank=0)
        Traceback (most recent call last):
        linattn.support.options.OptionError: rank: must be at least 1, got 0
    """

    steps: int = option(100, "Training steps.", least=1)
    lr: float = option(
        5e-4, "Highest learning rate; it rises for a twentieth of the steps, then falls to a hundredth of it.", above=0
    )
    rank: int = option(8, "Rank of the adapters.", least=1)
    alpha: float = option(16.0, "The adapters' output is scaled by alpha / rank.", above=0)
    targets: tuple[str, ...] | None = option(
        None, "Names of the projections that get adapters.", default_text="those of the attention"
    )
    objective: Literal["distill", "next_token", "mix"] = option(
        "distill", "Match the teacher's answers, predict the text itself, or both."
    )
    distill_weight: float = option(0.5, "Weight of the teacher's part in mix.", least=0, most=1)
    pooled_weight: float = option(
        1.0, "For an encoder without a head: weight of the mean over tokens in distill, beside each token.", least=0
    )
    hidden_weight: float = option(
        0.0, "Weight of the hidden states after every layer, distilled beside the teacher's answer.", least=0
    )
    train_cores: bool = option(False, "Also train what stage 1 has trained, its scales faster by scale_factor.")
    accumulation: int = option(
        1, "Into how many parts a step's sequences are split, one after another: less memory, the same step.", least=1
    )

    def check(self) -> None:
        if self.targets == ():
            raise OptionError("targets", "must be names in a tuple, or None, got ()")
        if self.hidden_weight and self.objective == "next_token":
            raise OptionError("hidden_weight", "needs a teacher: objective must be distill or mix, got next_token")
        if self.batch_size % self.accumulation:
            raise OptionError("accumulation", f"must divide batch_size = {self.batch_size}, got {self.accumulation}")


@dataclass(frozen=True)
class FinetuneResult:
    """Losses of each step, and the number of ``parameters`` that were trained."""

    losses: list[float]
    parameters: int


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
    if not linearized_layers(model):
        raise ValueError("the model has no converted layers: call linattn.convert.convert.convert first")
    identity = {"model": model_digest(model), "weights": weights_digest(model)}
    with in_eval(model), adapted_model(model, options) as adapted:
        run = _Finetuning(adapted, options, batches=batches, folder=folder, progress=progress, accelerator=accelerator)
        result = FinetuneResult(**run.go(identity))
        adapted.merge()
    return result


class Adapted:
    """A converted model with adapters in its projections, which can also run as the teacher that it was."""

    def __init__(self, model: nn.Module, options: FinetuneOptions) -> None:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        names = target_names(model, options.targets)
        config = LoraConfig(r=options.rank, lora_alpha=options.alpha, target_modules=names, lora_dropout=0.0)  # type: ignore[arg-type]
        self.model, self.merged = model, False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)  # for one factor of each adapter; the other starts at 0
            self.peft: Any = get_peft_model(model, config)
        self._adapters: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        if options.train_cores:
            for layer in linearized_layers(model).values():
                in_fp32(layer.core).requires_grad_(True)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @contextmanager
    def as_teacher(self) -> Iterator[None]:
        self._switch("teacher")
        try:
            with torch.no_grad():
                yield
        finally:
            self._switch("student")

    def _switch(self, mode: Literal["teacher", "student"]) -> None:
        # Layer by layer: peft's own way searches the whole model first, which takes longer than a layer's pass.
        set_mode(self.model, mode)
        for adapter in self._adapters:
            adapter.enable_adapters(mode == "student")

    def merge(self) -> None:
        self.peft.merge_and_unload()
        self.merged = True


@contextmanager
def adapted_model(model: nn.Module, options: FinetuneOptions) -> Iterator[Adapted]:
    """The model with adapters. On exit these are gone: merged, or else the model is as before."""
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    cores = {
        number: {name: value.detach().clone() for name, value in layer.core.state_dict().items()}
        for number, layer in linearized_layers(model).items()
    }
    adapted = Adapted(model, options)
    try:
        yield adapted
    finally:
        if not adapted.merged:
            adapted.peft.unload()
            for number, layer in linearized_layers(model).items():
                layer.core.load_state_dict(cores[number])
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(wanted[name])
            parameter.grad = None


def target_names(model: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """Dotted paths of the projections that get adapters; the maps inside a core never do.

    ``targets`` are last parts of the names of projections, anywhere in the model; None: those of the converted
    attention.
    """
    layers = linearized_layers(model)
    inside = tuple(f"{name}." for name, module in model.named_modules() if module in layers.values())
    last = next(iter(layers.values())).adapter.lora_targets if targets is None else targets
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in last and ".core." not in name]
    names = [name for name in names if targets is not None or name.startswith(inside)]
    if not names:
        wanted = ", ".join(last) or "projections to adapt by default"
        raise OptionError("targets", f"must be names of the model's projections; it has no {wanted}")
    return names


class _Finetuning(StageRun):
    """The loop of this stage; all adapters together are one part."""

    number = 1
    options: FinetuneOptions

    def __init__(self, adapted: Adapted, options: FinetuneOptions, **more: Any) -> None:
        self.adapted = adapted
        super().__init__(adapted.model, {"adapters": nn.ParameterList(adapted.parameters())}, options, **more)

    def trained(self, part: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def step(self) -> Tensor:
        total = torch.zeros((), device=self.device)
        for part in pieces(self.batch(), self.options.accumulation):
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
        return {"losses": [row[0] for row in self.losses()], "parameters": trained}


def pieces(batch: Batch, count: int) -> Iterator[Batch]:
    """Split a batch into ``count`` parts with equally many rows."""
    rows = len(next(iter(batch.values())))
    if rows % count:
        raise OptionError("accumulation", f"must divide the {rows} rows of a batch, got {count}")
    for first in range(0, rows, rows // count):
        yield {name: value[first : first + rows // count] for name, value in batch.items()}
