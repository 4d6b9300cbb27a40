"""The whole conversion of a pretrained model: replacement, attention transfer, fine-tuning, and their quality."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from linattn.convert.adapters.families import find_adapter
from linattn.convert.convert import check_model, convert, plan_model
from linattn.convert.degrees.measure import MeasuredLayer, allocate, measured, start_features
from linattn.convert.evaluate.measures import Quality
from linattn.convert.finetune import FinetuneOptions
from linattn.convert.finetune import finetune as learn_adapters
from linattn.convert.plan import Plan
from linattn.convert.training.data import Data, Source
from linattn.convert.training.loop import Batch, Batches, StageOptions, is_main
from linattn.convert.transfer import LayerCurve, TransferOptions
from linattn.convert.transfer import transfer as learn_attention
from linattn.support.config import Config, option
from linattn.support.extras import need
from linattn.support.files import write_json
from linattn.support.options import OptionError, check_folder, check_option
from linattn.support.progress import reported

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

OnStage = Callable[[str, nn.Module], None]

# Recipes of the papers, as far as the options of the two stages can express them. Each stage reads Alpaca's cleaned
# instructions twice: 40 M tokens in both together. STILL was built on the code of LoLCATs, and is taken to use the same
# rates and text. In that code feature maps and the weight of the window share one learning rate: a scale_factor of 1.
_BOTH = {"batch_size": 8, "clip_norm": 1.0, "tokens": 20_000_000}
_FIRST = {"loss": "mse", "lr": 1e-2, "scale_factor": 1.0, **_BOTH}
_SECOND = {"objective": "next_token", "lr": 1e-4, "rank": 8, **_BOTH}
RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "still": (_FIRST, _SECOND | {"alpha": 8.0}),
    "lolcats": (_FIRST, _SECOND | {"alpha": 16.0}),
    # z learns at a rate of 0.02, the logarithm of alpha at ten times that. The authors then train the whole model for
    # each task, which this fine-tuning stage does not do: it keeps its own options.
    "dof": ({"loss": "cross_entropy", "lr": 0.02, "scale_factor": 10.0, "batch_size": 128}, {}),
}


@dataclass(frozen=True, kw_only=True)
class Split(Config):
    """A budget of features that layers of the method ``dof`` share by their degrees of freedom."""

    cost: int | None = option(None, "Mean number of features of a layer; None: the head's dimension.", least=1)
    clip: int | None = option(
        None, "Most features of a layer; what it takes from one is saved, not given to others: DoF+Clip of the paper, "
        "which clips to the head's dimension. None: no limit.", least=1,
    )  # fmt: skip
    tolerance: float = option(
        2**-4, "Of the degrees of freedom, in units of the largest eigenvalue; a smaller one gives more degrees.",
        above=0,
    )  # fmt: skip


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
            ``"features"`` takes a mechanism and its options; ``"dof"`` also takes those of :class:`Split`: ``cost``,
            the mean number of features, ``clip`` and ``tolerance``.

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
    if text is not None and batches is not None:
        raise OptionError("text", "and batches are two ways to say the same: give one of them")
    if folder is not None:
        check_folder("folder", Path(folder))
    split, method_options = taken(method, method_options)
    find_adapter(model)  # an unknown family is refused before any text is read
    check_model(model)
    stages: list[StageOptions] = [stage for stage in (transfer, finetune) if stage is not None]
    if text is None and batches is None:
        transfer = finetune = None
    data = None
    if text is not None:
        data = Data.of_text(model, text, tokenizer, stages)
    elif batches is not None:
        if any(stage.recall_share for stage in stages):
            raise OptionError("recall_share", "needs a text; batches that are given must repeat passages themselves")
        data = Data(lambda _: batches, list(held_out), None)
    if data is not None:
        transfer, finetune = (None if stage is None else data.sized(stage) for stage in (transfer, finetune))
    tokens = [_tokens_of(stage) for stage in (transfer, finetune)]  # tokens without a length are refused
    check_stages(model, method_options, transfer, finetune)
    if accelerator is not None:
        model.to(accelerator.device)
    begun, seed = perf_counter(), stages[0].seed if stages else 0
    probe = None if data is None else data.batches(data.sized(stages[0] if stages else TransferOptions()))
    chosen, degrees = _planned(model, method, layers, split, method_options, probe)
    report = LinearizeReport(method, chosen.to_dict())
    if split is not None and degrees is not None:
        rows = [{"layer": i, "degrees": each.mean.tolist(), "std": each.std.tolist()} for i, each in degrees.items()]
        report.degrees = {"tolerance": split.tolerance, "layers": rows}
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

    done("teacher")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # a resumed run starts from the same features
        convert(model, chosen)
    if degrees is not None:
        start_features(model, degrees, seed)
    done("converted")

    def train(name: str, learn: Callable[..., Any], stage: StageOptions, source: Data, **more: Any) -> Any:
        with reported(name, hidden=not (progress and is_main(accelerator))) as bar:
            place = None if folder is None else Path(folder) / name
            return learn(model, source.batches(stage), stage, place, progress=bar, accelerator=accelerator, **more)

    if data is not None and transfer is not None:
        report.curves = train("transfer", learn_attention, transfer, data, held_out=data.held_out)
        learned = any(curve.losses for curve in report.curves)  # cores without parameters are only measured
        done("transfer", tokens[0] if learned else 0)
    if data is not None and finetune is not None:
        report.losses = train("finetune", learn_adapters, finetune, data)
        done("finetune", tokens[1])
    return model


def _planned(
    model: Any,
    method: str,
    layers: Sequence[int] | None,
    split: Split | None,
    options: dict[str, Any],
    batches: Batches | None,
) -> tuple[Plan, dict[int, MeasuredLayer] | None]:
    """The plan, and the degrees of freedom that it is based on, if any: of a layer, the largest of its heads."""
    degrees = None
    if split is not None:
        own = "feature_dim" in options
        cost = split.cost or find_adapter(model).sites(model)[0].shape.head_dim
        options.setdefault("feature_dim", min(cost, split.clip or cost))
        if batches is not None:  # also for given dimensions: features start in units of real keys
            numbers = sorted(plan_model(model, method, layers=layers, **options).layers)
            degrees = measured(model, batches, numbers, split.tolerance)
            if not own:
                values = {index: float(each.mean.max()) for index, each in degrees.items()}
                options["feature_dim"] = allocate(values, cost, clip=split.clip)
    return plan_model(model, method, layers=layers, **options), degrees


def taken(method: str, options: Mapping[str, Any]) -> tuple[Split | None, dict[str, Any]]:
    """Divide a method's options into the :class:`Split` they ask for and all others; None unless it is ``dof``."""
    if method != "dof":
        return None, dict(options)
    names = {each.name for each in fields(Split)}
    given = {name: value for name, value in options.items() if name in names and value is not None}
    for name in ("cost", "clip"):
        if name in given and "feature_dim" in options:
            raise OptionError(name, "is for features that layers share, and feature_dim says how many each of them "
                              "has: give one of the two")  # fmt: skip
    return Split(**given), {name: value for name, value in options.items() if name not in names}


def _tokens_of(stage: StageOptions | None) -> int | None:
    """Number of tokens that a stage trains on; None if it has no length."""
    if stage is None or (stage.length is None and stage.tokens is None):
        return None
    return stage.steps_of(stage.length) * stage.batch_size * (stage.length or 0)


def check_stages(
    model: Any,
    method_options: Mapping[str, Any],
    transfer: TransferOptions | None,
    finetune: FinetuneOptions | None,
) -> None:
    """Refuse, before the first stage takes its time, what does not go with the model or the method."""
    # Rows are read off values that are unit vectors, as wide as T, which a gate is not.
    if transfer is not None and transfer.loss == "cross_entropy" and method_options.get("gate"):
        raise OptionError("loss", "must be mse for layers with a gate, got cross_entropy")
    if finetune is None:
        return
    need("fine-tuning", "peft")
    adapter, named = find_adapter(model), model.named_modules()
    known = {name.rpartition(".")[2] for name, module in named if getattr(module, "weight", None) is not None}
    for target in finetune.targets or ():
        if target not in known:
            usual = ", ".join(adapter.projections)
            raise OptionError("targets", f"must be names of the model's projections ({usual}, ...), got {target!r}")
    causal = all(site.shape.causal for site in adapter.sites(model))
    silent = hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is None
    if finetune.objective != "distill" and (silent or not causal):
        kind = type(model).__name__
        raise OptionError(
            "objective", f"must be distill for {kind}, which is no causal language model, got {finetune.objective!r}"
        )


def paper_stages(method: str) -> dict[str, Any]:
    """The arguments ``transfer`` and ``finetune`` of ``linearize`` that follow the paper of a method.

    These learning rates fall by a cosine; LoLCATs and STILL divide theirs by 10 when the loss stops falling.
    ``docs/linearize.md`` lists the other differences.

    Example:
        >>> stages = paper_stages("lolcats")
        >>> stages["transfer"].lr, stages["finetune"].lr, stages["finetune"].alpha, stages["finetune"].objective
        (0.01, 0.0001, 16.0, 'next_token')
    """
    first, second = with_recipe("paper", method, {}, {})
    return {"transfer": TransferOptions(**first), "finetune": FinetuneOptions(**second)}


def with_recipe(recipe: str, method: str, *given: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Fields of both stages from a recipe, except for those ``given``; the recipe ``""`` has none.

    Example:
        >>> with_recipe("paper", "still", {"lr": 1e-3, "steps": 5}, {})[0]["lr"]
        0.001
    """
    if not recipe:
        return given
    check_option("recipe", recipe, ("paper",))
    if method not in RECIPES:
        raise OptionError("recipe", f"paper exists for the methods {', '.join(RECIPES)}, got method {method!r}")
    # If steps are given, the recipe's tokens are dropped: they would take precedence.
    return tuple(
        {name: value for name, value in own.items() if not (name == "tokens" and "steps" in fields)} | fields
        for own, fields in zip(RECIPES[method], given, strict=True)
    )
