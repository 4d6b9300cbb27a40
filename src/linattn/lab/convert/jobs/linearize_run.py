"""The command ``linattn linearize``: from a folder with a model to one with its linear successor and a report."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from linattn.convert.adapters import find_adapter
from linattn.convert.evaluate.evaluator import Evaluator
from linattn.convert.evaluate.needle_text import encoder, least_length
from linattn.convert.evaluate.options import EvaluationOptions
from linattn.convert.files import save_linearized
from linattn.convert.run import linearize
from linattn.convert.training.data import TokenText, read_text
from linattn.convert.training.loop import UnstableError
from linattn.lab.convert.jobs.linearize_job import SETTINGS, Job
from linattn.lab.convert.jobs.model_folder import load, load_tokenizer, quiet_transformers
from linattn.lab.convert.jobs.sources import documents, labelled
from linattn.lab.convert.report import RESULTS, write_report
from linattn.support.checkpoint import ResumeError
from linattn.support.files import write_json
from linattn.support.machine import describe_run
from linattn.support.options import OptionError


def linearize_folder(job: Job, console: Console) -> int:
    """Run a job and report on the console; a job that was stopped goes on.

    Exit code: 0, 1 if it diverged, 130 if interrupted.
    """
    model = job.check()
    causal = all(site.shape.causal for site in find_adapter(model).sites(model))
    tokenizer = load_tokenizer(job.model) if job.text or job.evaluation is not None else None
    evaluator = None
    if job.evaluation is not None:
        evaluator = _evaluator(job, tokenizer, causal, job.evaluation_options(model), console)

    def on_stage(name: str, model: Any) -> None:
        write_json(job.out / "run" / SETTINGS, job.settings())  # not before: everything was checked by now
        console.print(f"[bold]{name}[/bold]")
        for curve in model.linearize_report.curves if name == "transfer" else ():
            console.print(
                f"  layer {curve.layer} misses {curve.before:.4f} of its output before, {curve.after:.4f} after"
            )
        if evaluator is not None:
            evaluator.stage(name, model, full=name in ("teacher", job.last_stage))

    try:
        converted = linearize(
            load(job.model, job.device, job.precision), job.method, text=list(job.text) or None, tokenizer=tokenizer,
            transfer=job.transfer, finetune=job.finetune, folder=job.out / "run", layers=job.layers,
            progress=console.is_terminal, on_stage=on_stage, **job.options,
        )  # fmt: skip
        ablation = None if evaluator is None else evaluator.ablation(converted, job.last_stage)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on")
        return 130
    except ResumeError as error:
        raise OptionError("out", str(error)) from error
    except UnstableError as error:
        console.print(f"[red]{error}[/red]")
        return 1
    with quiet_transformers():
        save_linearized(converted, job.out)
        if tokenizer is not None:
            tokenizer.save_pretrained(job.out)
    _write(job, converted, evaluator, ablation)
    console.print(f"model   {job.out}")
    if job.page:
        console.print(f"report  {write_report(job.out)}")
    return 0


def _write(job: Job, model: Any, evaluator: Evaluator | None, ablation: dict[str, Any] | None) -> None:
    own = model.linearize_report.as_dict()
    tokens = sum(stage["tokens"] or 0 for stage in own["stages"])
    meta = describe_run(torch.device(job.device)) | {
        "model": job.model.resolve().name, "method": job.method, "converted": len(own["plan"]["layers"]),
        "training_tokens": tokens, "settings": _flat(job.settings() | {"model": job.model.resolve().name}),
        "evaluation": None if evaluator is None else evaluator.options.as_dict(),
    }  # fmt: skip
    stages = evaluator.stages if evaluator is not None else []
    seconds = {stage["name"]: stage["seconds"] for stage in own["stages"]}
    found = {
        "meta": meta, "plan": own["plan"], "degrees": own["degrees"], "quality": own["stages"],
        "metric": own["metric"], "stages": [{**stage, "seconds": seconds.get(stage["name"])} for stage in stages],
        "transfer": own["curves"], "finetune": own["losses"], "ablation": ablation,
    }  # fmt: skip
    for path in (job.out / RESULTS, job.results):
        if path is not None:
            write_json(path, found)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name} ") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def _evaluator(job: Job, tokenizer: Any, causal: bool, options: EvaluationOptions, console: Console) -> Evaluator:
    texts = [text for source in job.eval_text for text in documents("eval_text", source)]
    pieces = None
    if not texts and job.text:
        pieces = held_out_pieces(read_text(list(job.text), tokenizer), options)
        texts = [tokenizer.decode(piece, skip_special_tokens=True) for piece in pieces]
    if causal and "needle_lengths" not in (job.evaluation or {}):
        options = _with_room_for_needles(options, tokenizer, console)
    rows = None if job.probe is None else labelled(job.probe)
    if rows is not None and options.probe_texts is not None:
        rows = rows.first(options.probe_texts)
    path = job.out / "run" / "evaluation.json"
    return Evaluator(tokenizer, texts, options, causal, path, lambda line: console.print(f"  {line}"), rows, pieces)


def _with_room_for_needles(options: EvaluationOptions, tokenizer: Any, console: Console) -> EvaluationOptions:
    """Drop the default lengths that are too short for a needle with this tokenizer."""
    least = least_length(encoder(tokenizer), options.needle_digits)
    fit = tuple(length for length in options.needle_lengths if length >= least)
    for length in options.needle_lengths:
        if length not in fit:
            console.print(f"no needles in {length} tokens: the needle and its question have {least}")
    return replace(options, needle_lengths=fit)


def held_out_pieces(text: TokenText, options: EvaluationOptions) -> list[list[int]]:
    """Ids of the held-out part in pieces: as long as the longest window, or as many as the texts asked for."""
    least = max(options.lengths, default=256) * options.windows
    size = max(least, -(-len(text.held_out) // options.texts))
    return [piece.tolist() for piece in text.held_out.split(size)]
