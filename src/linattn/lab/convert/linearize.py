"""The command ``linattn linearize``: from a folder with a pretrained model to one with its linear successor."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass, replace
from dataclasses import field as dataclass_field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, get_type_hints

from linattn.convert.adapters import find_adapter
from linattn.convert.convert import check_model, plan_model
from linattn.convert.core import build_core
from linattn.convert.evaluate.evaluator import FIGURES, EvaluationOptions, Evaluator
from linattn.convert.evaluate.needles import encoder, least_length
from linattn.convert.files import save_linearized
from linattn.convert.finetune import FinetuneOptions
from linattn.convert.plan import METHODS
from linattn.convert.run import check_stages, linearize, taken, with_recipe
from linattn.convert.training.data import TokenText, read_text
from linattn.convert.training.loop import StageOptions, UnstableError
from linattn.convert.transfer import TransferOptions
from linattn.lab.cases import kept
from linattn.lab.convert.folder import Pretrained, documents, labelled, load_tokenizer, named, sketch
from linattn.lab.screen import Screen
from linattn.support.checkpoint import ResumeError
from linattn.support.config import Config, as_json, option_of
from linattn.support.config import option as field
from linattn.support.extras import need
from linattn.support.files import remove_halves, write_json
from linattn.support.machine import describe_run
from linattn.support.options import OptionError
from linattn.support.progress import without_bars

RIGHT, DIVERGED = 0, 1
SETTINGS = Path("run/settings.json")  # what a run that goes on must share with the one before
TRAINING, TUNING = "Attention transfer", "Fine-tuning"
BOTH = ("steps", "tokens", "batch_size", "length", "recall_share", "lr")  # options of both stages
# The name of an option in the command -> its name in the options of the stage.
FIRST = {name: name for name in (*BOTH, "loss")}
SECOND = {f"finetune_{name}": name for name in BOTH} | {
    name: name for name in ("rank", "alpha", "objective", "targets", "pooled_weight", "hidden_weight", "train_cores",
                            "scale_factor")
}  # fmt: skip
SHOWN = ("steps", "tokens", "length", "lr", "finetune_steps", "finetune_lr", "rank")  # on the first page of the help
ALIKE = ("length", "recall_share")  # which the second stage has from the first, unless it is told otherwise


def of_stage(kind: type[StageOptions], names: Mapping[str, str], group: str) -> list[tuple[str, Any, Any]]:
    """Fields of the command for options of a stage: None stands for the stage's own default, or a recipe's."""
    hints, made = get_type_hints(kind), []
    for name, own in names.items():
        default, rule = kind.__dataclass_fields__[own].default, option_of(kind.__dataclass_fields__[own])
        words = "as above" if own in ALIKE and name != own else rule.default_text or str(default or "")
        rule = replace(rule, group=group, rare=name not in SHOWN, default_text=words)
        made.append((name, hints[own] | None, dataclass_field(default=None, metadata={"option": rule})))
    return made


Stages: Any = make_dataclass(
    "Stages",
    [*of_stage(TransferOptions, FIRST, TRAINING), *of_stage(FinetuneOptions, SECOND, TUNING)],
    bases=(Config,), frozen=True, kw_only=True,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Linearize(EvaluationOptions, Stages, Pretrained):
    """Make a pretrained model linear: convert its attention, train what is new on text, and report what was lost.

    The result is a model of transformers: `linattn generate` writes with it, and linattn.convert.files loads it.

    Exit code: 0 all right, 1 the training diverged, 2 a bad option, 130 interrupted (the same command goes on).
    """

    out: Path = field(help="Folder of the result; started again with the same options, it goes on.", affects=False)
    method: str = field("still", "What the attention becomes.", choices=METHODS)
    layers: tuple[int, ...] | None = field(
        None, "Numbers of the layers to convert, with commas.", default_text="all", rare=True
    )
    recipe: str = field(
        "", "paper: both stages as the paper of still, lolcats or dof trains them, but for options that are given.",
        group=TRAINING,
    )  # fmt: skip
    transfer: bool = field(True, "Do this stage.", group=TRAINING)
    finetune: bool = field(True, "Do this stage.", group=TUNING)
    eval_text: tuple[str, ...] = field(
        (), "Texts to measure on.", group=FIGURES, affects=False, default_text="what is held out of --text",
        repeated=True,
    )  # fmt: skip
    probe: Path | None = field(
        None, "Encoders: folder with labelled train.jsonl and test.jsonl.", group=FIGURES, affects=False, rare=True
    )
    page: bool = field(True, "Write a page with charts.", affects=False, rare=True)
    evaluate: bool = field(True, "Measure the teacher and each stage.", group=FIGURES, affects=False)
    option: dict[str, Any] = field(
        {}, "Option of the method: key=value, such as window=128 or mechanism=mirror; may be given again."
    )

    @classmethod
    def parse(cls, texts: Mapping[str, Any]) -> Self:
        """``none`` of a list of lengths: not one of them."""
        lists = ("lengths", "needle_lengths", "contexts")
        return super().parse({name: () if name in lists and text == "none" else text for name, text in texts.items()})

    def run(self, screen: Screen) -> int:
        stages = self.stages()
        sketched, settings = self.check_all(stages), self.settings(stages)
        for folder in (self.out, self.out / "run", self.out / "run" / "figures"):
            remove_halves(folder)  # of a run that was killed while it wrote
        tokenizer = load_tokenizer(self.model) if self.text or self.evaluate else None
        evaluator = self.evaluator(sketched, settings, tokenizer, screen) if self.evaluate else None
        last = [name for name, stage in stages.items() if stage is not None and self.text][-1:] or ["converted"]

        def on_stage(name: str, model: Any) -> None:
            write_json(self.out / SETTINGS, settings)  # not before: everything was checked by now
            screen.say(name)
            for row in model.linearize_report.curves if name == "transfer" else ():
                screen.say(f"  layer {row.layer} misses {row.before:.4f} of its output before, {row.after:.4f} after")
            if evaluator is not None:
                evaluator.stage(name, model, full=name in ("teacher", *last))

        try:
            converted = linearize(
                self.load(), self.method, text=list(self.text) or None, tokenizer=tokenizer, folder=self.out / "run",
                layers=self.layers, progress=not screen.quiet, on_stage=on_stage, **stages, **self.method_options(),
            )  # fmt: skip
        except ResumeError as error:
            raise OptionError("out", str(error)) from error
        except UnstableError as error:
            screen.warn(str(error))
            return DIVERGED
        ablation = None if evaluator is None else evaluator.ablation(converted, last[0])
        with without_bars(warnings=False):
            save_linearized(converted, self.out)
            if tokenizer is not None:
                tokenizer.save_pretrained(self.out)
        screen.say(f"model   {self.out}")
        figures = self.figures(settings, converted.linearize_report.as_dict(), evaluator) | {"ablation": ablation}
        write_json(self.out / "report.json", figures)
        if self.page and all(map(find_spec, ("pandas", "jinja2", "matplotlib"))):
            from linattn.lab.convert.linearize_page import lead, sections
            from linattn.lab.page import write_page

            title = f"{self.model.resolve().name}, linearized with {self.method}"
            page = write_page(self.out / "report.html", title, sections(figures), figures["meta"], lead(figures))
            screen.say(f"report  {page}")
        screen.result(figures)
        return RIGHT

    def figures(
        self, settings: Mapping[str, Any], made: Mapping[str, Any], evaluator: Evaluator | None
    ) -> dict[str, Any]:
        """What ``report.json`` has."""
        name, seconds = self.model.resolve().name, {stage["name"]: stage["seconds"] for stage in made["stages"]}
        config = {**settings, "model": name, "evaluation": None if evaluator is None else evaluator.options.values()}
        meta = describe_run(self.place()) | {
            "model": name, "method": self.method, "converted": len(made["plan"]["layers"]), "config": flat(config),
            "training_tokens": sum(stage["tokens"] or 0 for stage in made["stages"]),
        }  # fmt: skip
        measured = [] if evaluator is None else evaluator.stages
        return {
            "meta": meta, "plan": made["plan"], "degrees": made["degrees"], "quality": made["stages"],
            "metric": made["metric"], "transfer": made["curves"], "finetune": made["losses"],
            "stages": [{**stage, "seconds": seconds.get(stage["name"])} for stage in measured],
        }  # fmt: skip

    def stages(self) -> dict[str, Any]:
        """The options of both stages by the name of the stage, checked; None for one that is left out."""
        first, second = ({own: getattr(self, name) for name, own in names.items()} for names in (FIRST, SECOND))
        second |= {name: first[name] for name in ALIKE if second[name] is None}
        given = [{name: value for name, value in each.items() if value is not None} for each in (first, second)]
        first, second = (stage | {"seed": self.seed} for stage in with_recipe(self.recipe, self.method, *given))
        return {
            "transfer": TransferOptions(**first) if self.transfer else None,
            "finetune": FinetuneOptions(**second) if self.finetune else None,
        }

    def method_options(self) -> dict[str, Any]:
        return {name: {"true": True, "false": False}.get(str(value), value) for name, value in self.option.items()}

    def settings(self, stages: Mapping[str, Any]) -> dict[str, Any]:
        prints = {name: None if stage is None else stage.values(affecting=True) for name, stage in stages.items()}
        shared = {"model": self.model.resolve(), "method": self.method, "option": self.method_options(),
                  "layers": self.layers, "text": self.text, "precision": self.type_of_weights()}  # fmt: skip
        settings: dict[str, Any] = as_json(shared | prints)
        return settings

    def check_all(self, stages: Mapping[str, Any]) -> Any:
        """Raise OptionError before any work is done; returns the model without its weights."""
        need("linattn linearize", "transformers", "safetensors", *["peft"] * bool(stages["finetune"] and self.text))
        self.check_out(self.settings(stages))
        model = sketch(self.model)
        with named("model"):
            check_model(model)
        self.check_plan(model, stages)
        for name in ("text", "eval_text"):
            for source in getattr(self, name):
                documents(name, source)
        if self.evaluate and not self.text and not self.eval_text:
            raise OptionError("eval_text", "is needed to evaluate without --text; or use --no-evaluate")
        return model

    def check_out(self, settings: Mapping[str, Any]) -> None:
        """Raise unless the folder of the result is new or belongs to the same run."""
        if (kept_settings := self.out / SETTINGS).is_file():
            before = json.loads(kept_settings.read_text())
            if differ := ", ".join(name for name, value in settings.items() if before.get(name) != value):
                words = f"{self.out} holds a run with another {differ}; give a new folder, or the same options"
                raise OptionError("out", words)
        elif self.out.exists() and (not self.out.is_dir() or any(file.name != "run" for file in self.out.iterdir())):
            raise OptionError("out", f"{self.out} holds something else; give a new folder")

    def check_plan(self, model: Any, stages: Mapping[str, Any]) -> None:
        """Make the plan and the core of one layer, which checks the options of mechanisms."""
        options = self.method_options()
        try:
            # Dimensions are shared out only once the degrees of freedom are known.
            plan = plan_model(model, self.method, layers=self.layers, **taken(self.method, options)[1])
            index, layer = next(iter(plan.layers.items()))
            build_core(layer, {site.layer_idx: site.shape for site in find_adapter(model).sites(model)}[index])
        except (TypeError, ValueError) as error:
            about = {"layers": "layers"} | dict.fromkeys(options, "option")
            found = [name for start, name in about.items() if str(error).startswith(start)]
            raise OptionError(found[0] if found else "method", str(error)) from error
        if self.text:
            check_stages(model, options, **stages)

    def evaluator(self, model: Any, settings: Mapping[str, Any], tokenizer: Any, screen: Screen) -> Evaluator:
        options = EvaluationOptions(**{each.name: getattr(self, each.name) for each in fields(EvaluationOptions)})
        adapter, positions = find_adapter(model), getattr(model.config, "max_position_embeddings", None)
        options = options.suited(positions, self.place().type == "cuda", adapter.most_tokens(model))
        causal = all(site.shape.causal for site in adapter.sites(model))
        texts = [text for source in self.eval_text for text in documents("eval_text", source)]
        pieces = None
        if not texts:
            pieces = held_out_pieces(read_text(list(self.text), tokenizer), options)
            texts = [tokenizer.decode(piece, skip_special_tokens=True) for piece in pieces]
        if causal and self.needle_lengths is None:  # those that nobody asked for are left out where a needle is longer
            least, lengths = least_length(encoder(tokenizer)), options.needle_lengths or ()
            for length in [length for length in lengths if length < least]:
                screen.say(f"no needles in {length} tokens: the needle and its question have {least}")
            options = replace(options, needle_lengths=tuple(length for length in lengths if length >= least))
        rows = None if self.probe is None else labelled(self.probe)
        return Evaluator(
            tokenizer, texts, options, causal=causal, labelled=rows, pieces=pieces,
            tell=lambda line: screen.say(f"  {line}"),
            keep=lambda case, measure: kept(self.out / "run" / "figures", {**case, "run": settings}, measure),
        )  # fmt: skip


def held_out_pieces(text: TokenText, options: EvaluationOptions) -> list[list[int]]:
    """Ids of the held-out part in pieces: as long as the longest window, or as many as the texts asked for."""
    least = max(options.lengths or (), default=256) * options.windows
    size = max(least, -(-len(text.held_out) // options.texts))
    return [piece.tolist() for piece in text.held_out.split(size)]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under one name each, for the page."""
    flattened: dict[str, Any] = {}
    for name, value in values.items():
        flattened |= flat(value, f"{prefix}{name} ") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flattened
