"""The whole conversion of a pretrained model: replacement, attention transfer, fine-tuning, and their quality."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from linattn.convert.adapters import find_adapter
from linattn.convert.convert import check_model, convert, plan_model
from linattn.convert.degrees.allocate import taken
from linattn.convert.degrees.measure import measured, start_features
from linattn.convert.evaluate.quality import Quality
from linattn.convert.finetune import FinetuneOptions
from linattn.convert.finetune import finetune as learn_adapters
from linattn.convert.plan import Plan
from linattn.convert.training.data import Data, Source
from linattn.convert.training.loop import Batch, Batches, StageOptions, is_main
from linattn.convert.transfer import LayerCurve, TransferOptions
from linattn.convert.transfer import transfer as learn_attention
from linattn.support.extras import need
from linattn.support.files import write_json
from linattn.support.options import OptionError, check_folder
from linattn.support.progress import reported

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
        accelerator: of accelerate, for other devices and several processes.
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
    stages = _checked(transfer, finetune, text, batches, held_out, folder, accelerator)
    taken(method, method_options)
    find_adapter(model)  # an unknown family is refused before any text is read
    check_model(model)
    data = None
    if text is not None:
        data = Data.of_text(model, text, tokenizer, stages)
    elif batches is not None:
        data = Data(lambda _: batches, list(held_out), None)
    if data is None:
        transfer = finetune = None
    else:
        transfer, finetune = (None if stage is None else data.sized(stage) for stage in (transfer, finetune))
        for stage in (transfer, finetune):
            if stage is not None:
                stage.steps_of(stage.length)  # tokens without a length are refused
    if finetune is not None:
        need("fine-tuning", "peft")  # before the first stage takes its time
        check_targets(model, finetune)
        check_objective(model, finetune)
    if accelerator is not None:
        model.to(accelerator.device)
    begun, seed = perf_counter(), stages[0].seed if stages else 0
    probe = None if data is None else data.batches(data.sized(stages[0] if stages else TransferOptions()))
    chosen, degrees = _planned(model, method, layers, method_options, probe)
    if transfer is not None:
        check_loss(chosen, transfer)
    report = LinearizeReport(method, chosen.to_dict(), degrees=None if degrees is None else degrees.to_dict())
    quality = Quality(model, data.held_out) if data is not None and data.held_out else None
    report.metric = None if quality is None else quality.metric

    def done(name: str, tokens: int | None = 0) -> None:
        """Measure the model after a stage, and write the report so far."""
        nonlocal begun
        seconds = perf_counter() - begun
        figure = None if quality is None else quality.of(model)
        report.stages.append(StageFigures(name, figure, seconds, tokens))
        if folder is not None and is_main(accelerator):
            write_json(Path(folder) / "linearize_report.json", report.as_dict())
        model.linearize_report = report
        if on_stage is not None:
            on_stage(name, model)
        begun = perf_counter()

    def under(name: str) -> Path | None:
        return None if folder is None else Path(folder) / name

    done("teacher")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # a resumed run starts from the same features
        convert(model, chosen)
    if degrees is not None:
        start_features(model, degrees, seed)
    done("converted")
    hidden = not (progress and is_main(accelerator))
    if data is not None and transfer is not None:
        with reported("transfer", hidden=hidden) as bar:
            report.curves = learn_attention(
                model, data.batches(transfer), transfer, under("transfer"), held_out=data.held_out, progress=bar,
                accelerator=accelerator,
            )  # fmt: skip
        learned = any(curve.losses for curve in report.curves)  # cores without parameters are only measured
        done("transfer", _tokens_of(transfer) if learned else 0)
    if data is not None and finetune is not None:
        with reported("fine-tuning", hidden=hidden) as bar:
            result = learn_adapters(
                model, data.batches(finetune), finetune, under("finetune"), progress=bar, accelerator=accelerator
            )
        report.losses = result.losses
        done("finetune", _tokens_of(finetune))
    return model


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


def _tokens_of(stage: StageOptions) -> int | None:
    """Number of tokens that a stage trains on; None if it has no length."""
    return None if stage.length is None else stage.steps_of(stage.length) * stage.batch_size * stage.length


def _checked(
    transfer: object,
    finetune: object,
    text: object,
    batches: object,
    held_out: object,
    folder: str | Path | None,
    accelerator: object,
) -> list[StageOptions]:
    """Check the arguments of :func:`linearize` that need no model; returns the stages that are not None."""
    stages: list[StageOptions] = []
    for name, stage, kind in (("transfer", transfer, TransferOptions), ("finetune", finetune, FinetuneOptions)):
        if isinstance(stage, kind):
            stages.append(stage)
        elif stage is not None:
            raise OptionError(name, f"must be {kind.__name__}(...), or None to leave it out, got {stage!r}")
    if text is not None and batches is not None:
        raise OptionError("text", "and batches are two ways to say the same: give one of them")
    if batches is not None and not callable(batches):
        raise OptionError("batches", f"must be a function of a step's number, got {type(batches).__name__}")
    if batches is None and held_out:
        raise OptionError("held_out", "goes with batches; of a text the last tenth is held out by itself")
    if batches is not None and any(stage.recall_share for stage in stages):
        raise OptionError("recall_share", "needs a text; batches that are given must repeat passages themselves")
    if folder is not None:
        check_folder("folder", Path(folder))
    if accelerator is not None and not hasattr(accelerator, "device"):
        raise OptionError("accelerator", f"must be an Accelerator of accelerate, or None, got {accelerator!r}")
    return stages


def check_targets(model: nn.Module, finetune: FinetuneOptions) -> None:
    """Raise unless each target names a projection in some layer."""
    named = model.named_modules()
    known = {name.rpartition(".")[2] for name, module in named if getattr(module, "weight", None) is not None}
    for target in finetune.targets or ():
        if target not in known:
            usual = ", ".join(find_adapter(model).lora_targets)
            raise OptionError("targets", f"must be names of the model's projections ({usual}, ...), got {target!r}")


def check_objective(model: Any, finetune: FinetuneOptions) -> None:
    """Refuse next-token losses for a model that is not a causal language model."""
    causal = all(site.shape.causal for site in find_adapter(model).sites(model))
    silent = hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is None
    if finetune.objective != "distill" and (silent or not causal):
        kind = type(model).__name__
        raise OptionError(
            "objective", f"must be distill for {kind}, which is no causal language model, got {finetune.objective!r}"
        )


def check_loss(plan: Plan, transfer: TransferOptions) -> None:
    """Refuse the row loss with an output gate: rows are read off values that are unit vectors, as wide as T."""
    gated = [index for index, layer in plan.layers.items() if layer.gate]
    if transfer.loss == "cross_entropy" and gated:
        raise OptionError("loss", f"must be mse for layers with a gate, {gated}, got 'cross_entropy'")
