"""Checks of the arguments of ``linearize``, made before any work is done."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from linattn.convert.adapters import find_adapter
from linattn.convert.finetune import FinetuneOptions
from linattn.convert.plan import Plan
from linattn.convert.training.setting import StageOptions
from linattn.convert.transfer import TransferOptions
from linattn.support.options import OptionError, check_folder


def check_stages(transfer: object, finetune: object) -> list[StageOptions]:
    """The stages that are not None; raises for anything that is not a stage, or has invalid options."""
    for name, stage, kind in (("transfer", transfer, TransferOptions), ("finetune", finetune, FinetuneOptions)):
        if stage is not None and not isinstance(stage, kind):
            raise OptionError(name, f"must be {kind.__name__}(...), or None to leave it out, got {stage!r}")
    stages = [stage for stage in (transfer, finetune) if isinstance(stage, StageOptions)]
    for stage in stages:
        stage.check()
    return stages


def check_data(text: object, batches: object, held_out: object) -> None:
    if text is not None and batches is not None:
        raise OptionError("text", "and batches are two ways to say the same: give one of them")
    if batches is not None and not callable(batches):
        raise OptionError("batches", f"must be a function of a step's number, got {type(batches).__name__}")
    if batches is None and held_out:
        raise OptionError("held_out", "goes with batches; of a text the last tenth is held out by itself")


def check_recall(stages: Sequence[StageOptions], batches: object) -> None:
    """Refuse ``recall_share`` with ``batches``: only sequences that are drawn from a text can repeat passages."""
    if batches is not None and any(stage.recall_share for stage in stages):
        raise OptionError("recall_share", "needs a text; batches that are given must repeat passages themselves")


def as_folder(folder: str | Path | None) -> Path | None:
    """The folder as a path; raises unless it can be written to."""
    if folder is None:
        return None
    check_folder("folder", Path(folder))
    return Path(folder)


def check_accelerator(accelerator: object) -> None:
    if accelerator is not None and not hasattr(accelerator, "device"):
        raise OptionError("accelerator", f"must be an Accelerator of accelerate, or None, got {accelerator!r}")


def check_targets(model: nn.Module, finetune: FinetuneOptions) -> None:
    """Raise unless each target names a projection in some layer."""
    known = {
        name.rpartition(".")[2] for name, module in model.named_modules() if getattr(module, "weight", None) is not None
    }
    for target in finetune.targets or ():
        if target not in known:
            usual = ", ".join(find_adapter(model).lora_targets)
            raise OptionError("targets", f"must be names of the model's projections ({usual}, ...), got {target!r}")


def check_objective(model: Any, finetune: FinetuneOptions) -> None:
    """Refuse next-token losses for a model that is not a causal language model."""
    causal = all(site.shape.causal for site in find_adapter(model).sites(model))
    silent = hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is None
    if finetune.objective != "distill" and (silent or not causal):
        raise OptionError(
            "objective", f"must be distill for {type(model).__name__}, which is no causal language model, got "
            f"{finetune.objective!r}"
        )  # fmt: skip


def check_loss(plan: Plan, transfer: TransferOptions) -> None:
    """Refuse the row loss with an output gate: rows are read off values that are unit vectors, as wide as T."""
    gated = [index for index, layer in plan.layers.items() if layer.gate]
    if transfer.loss == "cross_entropy" and gated:
        raise OptionError("loss", f"must be mse for layers with a gate, {gated}, got 'cross_entropy'")


def check_steps(stages: Sequence[StageOptions], length: int | None) -> None:
    """Turn ``tokens`` into steps where a sequence length is known; refuse ``tokens`` where none is."""
    for stage in stages:
        stage.steps_of(stage.length if stage.length is not None else length)
