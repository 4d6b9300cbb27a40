"""The command ``linattn inspect``: from a folder with a model to its diagnosis."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from linattn.convert.inspect import InspectOptions, convertible_sites, inspect
from linattn.convert.training.data import batched, check_positions, read_text, suited_length
from linattn.convert.training.loop import Batch
from linattn.lab.convert.inspect_page import screen_table, summary, write_diagnosis
from linattn.lab.convert.jobs.model_folder import DTYPES, load, load_tokenizer, sketch
from linattn.lab.convert.jobs.sources import documents
from linattn.support.extras import need
from linattn.support.machine import describe_run
from linattn.support.options import OptionError, check_device, check_folder, check_option
from linattn.support.progress import reported

LONGEST = 512  # tokens of a sequence by default


@dataclass(frozen=True)
class InspectJob:
    """All settings that decide a diagnosis; ``length`` 0: what the model was made for, at most 512 tokens."""

    model: Path
    folder: Path
    text: tuple[str, ...]
    options: InspectOptions
    length: int = 0
    batch_size: int = 2
    held_out: int = 4
    device: str = "cpu"
    precision: str = "fp32"
    page: bool = True

    def check(self) -> Any:
        """Raise OptionError before any work is done; returns the model without its weights."""
        need("linattn inspect", "transformers", "safetensors", *(["matplotlib"] if self.page else []))
        self.options.check()
        check_device(self.device)
        check_option("precision", self.precision, DTYPES)
        for name, least in (("length", 0), ("batch_size", 1), ("held_out", 1)):
            if getattr(self, name) < least:
                raise OptionError(name, f"must be an integer >= {least}, got {getattr(self, name)}")
        check_folder("output", self.folder)
        if self.length == 1:
            raise OptionError("length", "must be at least 2 tokens, or 0: the model's own, got 1")
        model = sketch(self.model)
        try:
            convertible_sites(model)
        except ValueError as error:
            raise OptionError("model", str(error)) from error
        check_positions(model, "length", self.length)
        for source in self.text:
            documents("text", source)
        return model


def inspect_folder(job: InspectJob, console: Console) -> int:
    """Run the diagnosis, print a table, write ``inspect.json`` and ``inspect.html``.

    Exit code: 0, or 130 if interrupted.
    """
    model = job.check()
    length = job.length or suited_length(model, LONGEST)
    text = read_text(list(job.text), load_tokenizer(job.model))
    batches = text.batches(job.batch_size, length, job.options.seed)
    held_out: list[Batch] = list(batched(text.windows(length, job.held_out), 1))
    try:
        with reported("inspect", hidden=not console.is_terminal) as bar:
            found = inspect(load(job.model, job.device, job.precision), batches, held_out, job.options, progress=bar)
    except KeyboardInterrupt:
        console.print("interrupted, nothing was written")
        return 130
    settings = asdict(job.options) | {"length": length, "text": list(job.text), "held_out": len(held_out)}
    meta = describe_run(torch.device(job.device)) | {"model": job.model.resolve().name, "settings": settings}
    console.print(screen_table(found))
    console.print(summary([diagnosis.as_dict() for diagnosis in found]))
    write_diagnosis(job.folder, meta, found, page=job.page)
    console.print(f"numbers {job.folder / 'inspect.json'}")
    if job.page:
        console.print(f"page    {job.folder / 'inspect.html'}")
    return 0
