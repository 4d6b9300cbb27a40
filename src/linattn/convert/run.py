"""The whole conversion of a pretrained model: replacement, attention transfer, fine-tuning, and their quality."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from linattn.convert.adapters import find_adapter
from linattn.convert.arguments import (
    as_folder,
    check_accelerator,
    check_data,
    check_loss,
    check_objective,
    check_recall,
    check_stages,
    check_steps,
    check_targets,
)
from linattn.convert.convert import check_model, convert, plan_model
from linattn.convert.degrees.allocate import taken
from linattn.convert.degrees.measure import measured, start_features
from linattn.convert.evaluate.quality import Quality
from linattn.convert.finetune import FinetuneOptions, finetune
from linattn.convert.plan import Plan
from linattn.convert.training.data import Data, tokens_of
from linattn.convert.training.setting import Batch, Batches, is_main, stage_bar
from linattn.convert.training.text import Source
from linattn.convert.transfer import LayerCurve, TransferOptions, transfer
from linattn.support.extras import need
from linattn.support.files import write_json

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

OnStage = Callable[[str, nn.Module], None]


@dataclass(frozen=True)
class StageFigures:
    """Figures of one stage: teacher, converted, transfer or finetune.

    Attributes:
        quality: measured on held-out data after the stage; None without such data.
        tokens: number of tokens that it was trained on; None if the batches are not text.
    """

    name: str
    quality: float | None
    seconds: float
    tokens: int | None = 0


@dataclass
class LinearizeReport:
    """Report of a conversion, which a converted model holds as ``linearize_report``.

    Attributes:
        metric: what ``quality`` is: ``"perplexity"``, where less is better, or ``"cosine"`` to the teacher's answers.
        curves: learning curves of stage 1, by layer.
        losses: losses of stage 2, by step.
    """

    method: str
    plan: dict[str, Any]
    metric: str | None = None
    stages: list[StageFigures] = field(default_factory=list)
    curves: list[LayerCurve] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    degrees: dict[str, Any] | None = None

    def quality(self, stage: str) -> float | None:
        """Quality after one stage; None if the stage did not run."""
        return next((figures.quality for figures in self.stages if figures.name == stage), None)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def linearize(
    model: Any,
    method: str = "still",
    *,
    text: Source | Sequence[Source] | None = None,
    tokenizer: Any = None,
    batches: Batches | None = None,
    held_out: Sequence[Batch] = (),
    transfer: TransferOptions | None = TransferOptions(),  # noqa: B008, frozen
    finetune: FinetuneOptions | None = FinetuneOptions(),  # noqa: B008, frozen
    folder: str | Path | None = None,
    layers: Sequence[int] | None = None,
    progress: bool = False,
    on_stage: OnStage | None = None,
    accelerator: "Accelerator | None" = None,
    **method_options: Any,
) -> Any:
    """Replace the attention of a pretrained model in place, and train the new parts on text.

    The stages are conversion, attention transfer (each layer learns the softmax it replaces), and low-rank fine-tuning
    against the original model, whose adapters are merged at the end. Without text or batches only the conversion runs.

    Args:
        model: of transformers or timm, from a family that has an adapter.
        method: one of ``linattn.convert.plan.METHODS``.
        text: text files, folders of them or jsonl files; a tenth is held out.
        tokenizer: the model's; None: read from where the model came from.
        batches: instead of a text, a function from the number of a step to the model's arguments: for pictures, say.
        held_out: batches that quality is measured on, with ``batches``.
        transfer, finetune: options of the two training stages; None leaves a stage out.
        folder: for this run alone: finished work is kept there, and the same call resumes a run that was stopped.
        layers: numbers of the layers to convert; None: all that can be converted.
        progress: show a bar.
        on_stage: called after each stage with its name (teacher, converted, transfer, finetune) and the model, whose
            ``linearize_report`` holds what is known so far.
        accelerator: of ``linattn.lab.train.accelerator.create_accelerator``, for other devices and several processes.
        method_options: fields of ``linattn.convert.plan.LayerPlan`` that differ from the method's own. The method
            ``"features"`` takes a mechanism and its options; ``"dof"`` also takes those of
            :class:`linattn.convert.degrees.allocate.Split`: ``cost``, the mean number of features, ``clip`` and
            ``tolerance``.

    Returns:
        The model, with ``linearize_report``.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> import linattn
        >>> config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        ...                      vocab_size=64)
        >>> model = linattn.linearize(LlamaForCausalLM(config), method="lolcats", window=16)
        >>> model.linearize_report.plan["layers"]["0"]["window"]
        16
    """
    stages, folder = check_stages(transfer, finetune), as_folder(folder)
    check_data(text, batches, held_out)
    check_recall(stages, batches)
    taken(method, method_options)
    check_accelerator(accelerator)
    find_adapter(model)  # an unknown family is refused before any text is read
    check_model(model)
    data = None if batches is None else Data.of_batches(batches, held_out)
    if text is not None:
        data = Data.of_text(model, text, tokenizer, stages)
    if data is not None:
        check_steps(stages, data.length)
    if data is not None and finetune is not None:
        need("fine-tuning", "peft")  # before the first stage takes its time
        check_targets(model, finetune)
        check_objective(model, finetune)
    job = _Job(model, folder, progress, on_stage, accelerator)
    return job.run(method, layers, method_options, data, transfer, finetune)


class _Job:
    """Takes one model from stage to stage."""

    def __init__(
        self,
        model: Any,
        folder: Path | None,
        progress: bool,
        on_stage: OnStage | None,
        accelerator: "Accelerator | None",
    ) -> None:
        self.model, self.folder, self.on_stage, self.accelerator = model, folder, on_stage, accelerator
        self.hidden = not (progress and is_main(accelerator))
        self.quality: Quality | None = None
        self.report: LinearizeReport | None = None

    def run(
        self,
        method: str,
        layers: Sequence[int] | None,
        options: Mapping[str, Any],
        data: Data | None,
        first: TransferOptions | None,
        second: FinetuneOptions | None,
    ) -> Any:
        if self.accelerator is not None:
            self.model.to(self.accelerator.device)
        seed = next((stage.seed for stage in (first, second) if stage is not None), 0)
        begun = perf_counter()
        probe = None if data is None else data.batches(data.sized(first or second or TransferOptions()))
        chosen, degrees = _planned(self.model, method, layers, dict(options), probe)
        if data is not None and first is not None:
            check_loss(chosen, first)
        self.report = LinearizeReport(method, chosen.to_dict(), degrees=None if degrees is None else degrees.to_dict())
        if data is not None and data.held_out:
            self.quality = Quality(self.model, data.held_out)
            self.report.metric = self.quality.metric
        self._done("teacher", begun)
        begun = perf_counter()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # a resumed run starts from the same features
            convert(self.model, chosen)
        if degrees is not None:
            start_features(self.model, degrees, seed)
        self._done("converted", begun)
        if data is not None and first is not None:
            self._transfer(data, data.sized(first))
        if data is not None and second is not None:
            self._finetune(data, data.sized(second))
        return self.model

    def _transfer(self, data: Data, options: TransferOptions) -> None:
        assert self.report is not None
        begun = perf_counter()
        with stage_bar("transfer", hidden=self.hidden) as bar:
            self.report.curves = transfer(
                self.model, data.batches(options), options, self._under("transfer"), held_out=data.held_out,
                progress=bar, accelerator=self.accelerator,
            )  # fmt: skip
        learned = any(curve.losses for curve in self.report.curves)  # cores without parameters are only measured
        self._done("transfer", begun, tokens_of(options) if learned else 0)

    def _finetune(self, data: Data, options: FinetuneOptions) -> None:
        assert self.report is not None
        begun = perf_counter()
        with stage_bar("fine-tuning", hidden=self.hidden) as bar:
            result = finetune(
                self.model, data.batches(options), options, self._under("finetune"), progress=bar,
                accelerator=self.accelerator,
            )  # fmt: skip
        self.report.losses = result.losses
        self._done("finetune", begun, tokens_of(options))

    def _done(self, name: str, begun: float, tokens: int | None = 0) -> None:
        """Measure the model after a stage, and write the report so far."""
        assert self.report is not None
        seconds = perf_counter() - begun
        quality = None if self.quality is None else self.quality.of(self.model)
        self.report.stages.append(StageFigures(name, quality, seconds, tokens))
        if self.folder is not None and is_main(self.accelerator):
            write_json(self.folder / "linearize_report.json", self.report.as_dict())
        self.model.linearize_report = self.report
        if self.on_stage is not None:
            self.on_stage(name, self.model)

    def _under(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / name


def _planned(
    model: Any, method: str, layers: Sequence[int] | None, options: dict[str, Any], batches: Batches | None
) -> tuple[Plan, Any]:
    """The plan, and the degrees of freedom that it is based on, if any."""
    split, options = taken(method, options)
    degrees = None
    if split is not None:
        shared, head_dim = "feature_dim" not in options, find_adapter(model).sites(model)[0].shape.head_dim
        options.setdefault("feature_dim", split.without_degrees(head_dim))
        if batches is not None:  # also for given dimensions: features start in units of real keys
            numbers = sorted(plan_model(model, method, layers=layers, **options).layers)
            degrees = measured(model, batches, numbers, split.tolerance)
            if shared:
                options["feature_dim"] = split.dims(degrees.values(), head_dim)
    return plan_model(model, method, layers=layers, **options), degrees
