"""The settings of ``linattn linearize``, checked before any work is done."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from json import loads
from pathlib import Path
from typing import Any

from linattn.convert.adapters import find_adapter
from linattn.convert.convert import check_model, plan_model
from linattn.convert.degrees.split import taken
from linattn.convert.evaluate.options import EvaluationOptions
from linattn.convert.finetune import FinetuneOptions
from linattn.convert.layer.core import build_core
from linattn.convert.plan import METHODS
from linattn.convert.run import check_loss, check_objective, check_targets
from linattn.convert.training.loop import StageOptions
from linattn.convert.transfer import TransferOptions
from linattn.lab.convert.jobs.model_folder import DTYPES, load_tokenizer, sketch
from linattn.lab.convert.jobs.sources import documents, labelled
from linattn.support.extras import need
from linattn.support.options import OptionError, check_device, check_option

SETTINGS = "settings.json"  # in the folder of the run: identifies the run


@dataclass(frozen=True)
class Job:
    """All settings that decide a conversion; a stage whose options ``transfer`` or ``finetune`` are None is left out.

    Attributes:
        model: folder of the pretrained model.
        out: folder of the result: the model, ``report.json``, ``report.html``, and in ``run`` what resuming needs.
        text: files to train on; none: conversion alone.
        eval_text: files that are never trained on, each document a text; none: the held-out part of ``text``.
        evaluation: fields of ``EvaluationOptions`` that differ from what suits the model; None: no evaluation.
        probe: folder with ``train.jsonl`` and ``test.jsonl`` of texts with labels, for encoders.
        options: options of the method.
        results: a file that also receives ``report.json``.
    """

    model: Path
    out: Path
    method: str = "still"
    text: tuple[str, ...] = ()
    eval_text: tuple[str, ...] = ()
    transfer: TransferOptions | None = field(default_factory=TransferOptions)
    finetune: FinetuneOptions | None = field(default_factory=FinetuneOptions)
    evaluation: Mapping[str, Any] | None = field(default_factory=dict)
    probe: Path | None = None
    layers: tuple[int, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    precision: str = "fp32"
    page: bool = True
    results: Path | None = None

    def settings(self) -> dict[str, Any]:
        """The settings that a run must share with the one it resumes."""
        stages = {name: None if each is None else each.values(affecting=True)
                  for name, each in (("transfer", self.transfer), ("finetune", self.finetune))}  # fmt: skip
        return {
            "model": str(self.model.resolve()), "method": self.method, "options": dict(self.options),
            "layers": None if self.layers is None else list(self.layers), "text": list(self.text), **stages,
            "precision": self.precision,
        }  # fmt: skip

    @property
    def last_stage(self) -> str:
        if self.text and self.finetune is not None:
            return "finetune"
        return "transfer" if self.text and self.transfer is not None else "converted"

    def check(self) -> Any:
        """Raise OptionError before any work is done; returns the model without its weights."""
        packages = ["transformers", "safetensors"]
        packages += ["peft"] if self.finetune is not None and self.text else []
        need("linattn linearize", *packages, *(["matplotlib"] if self.page else []))
        check_option("method", self.method, METHODS)
        check_device(self.device)
        check_option("precision", self.precision, DTYPES)
        check_out(self.out, self.settings())
        check_results(self.results)
        model = sketch(self.model)
        try:
            check_model(model)
        except ValueError as error:
            raise OptionError("model", str(error)) from error
        self._check_plan(model)
        for option, sources in (("text", self.text), ("eval_text", self.eval_text)):
            for source in sources:
                documents(option, source)
        if self.evaluation is not None and not self.text and not self.eval_text:
            raise OptionError("eval_text", "is needed to evaluate without --text; or use --no-evaluate")
        if self.text or self.evaluation is not None:
            load_tokenizer(self.model)
        if self.probe is not None:
            labelled(self.probe)
        self.evaluation_options(model).check(find_adapter(model).most_tokens(model))
        return model

    def _check_plan(self, model: Any) -> None:
        """Make the plan and the core of one layer, which checks the options of mechanisms."""
        try:
            # Dimensions are shared out only once the degrees of freedom are known.
            options = taken(self.method, self.options)[1]
            found = plan_model(model, self.method, layers=self.layers, **options)
            index, layer = next(iter(found.layers.items()))
            shapes = {site.layer_idx: site.shape for site in find_adapter(model).sites(model)}
            build_core(layer, shapes[index])
        except (TypeError, ValueError) as error:
            named = [name for name in ("layers", *self.options) if str(error).startswith(name)]
            option = "method" if not named else "layers" if named[0] == "layers" else "option"
            raise OptionError(option, str(error)) from error
        if self.text and self.transfer is not None:
            check_loss(found, self.transfer)
        if self.text and self.finetune is not None:
            check_targets(model, self.finetune)
            check_objective(model, self.finetune)

    def evaluation_options(self, model: Any) -> EvaluationOptions:
        positions, most = getattr(model.config, "max_position_embeddings", None), find_adapter(model).most_tokens(model)
        return EvaluationOptions.suited(positions, self.device.startswith("cuda"), self.evaluation or {}, most)


def finetune_options(fields: Mapping[str, Any]) -> FinetuneOptions:
    """Options of the second stage; errors name those that both stages have as the command does, with ``finetune_``."""
    try:
        return FinetuneOptions(**fields)
    except OptionError as error:
        shared = error.option in StageOptions.__dataclass_fields__
        raise OptionError("finetune_" * shared + error.option, error.message) from error


def check_out(out: Path, settings: Mapping[str, Any]) -> None:
    """Raise unless the folder of the result is new or belongs to the same run."""
    if not out.exists():
        return
    path = out / "run" / SETTINGS
    if not out.is_dir() or (any(file.name != "run" for file in out.iterdir()) and not path.is_file()):
        raise OptionError("out", f"{out} holds something else; give a new folder")
    if path.is_file():
        kept = loads(path.read_text())
        differ = [name for name, value in settings.items() if kept.get(name) != value]
        if differ:
            raise OptionError(
                "out", f"{out} holds a run with another {', '.join(differ)}; give a new folder, or the same options"
            )


def check_results(path: Path | None) -> None:
    """Raise unless the file that is written last can be written."""
    if path is None:
        return
    place = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not place.is_dir() or not os.access(place, os.W_OK):
        raise OptionError("results", f"must be a file in a folder that can be written to, got {path}")
