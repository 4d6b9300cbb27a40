"""Folders with pretrained models of transformers, texts with labels, and the options that name them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from linattn.convert.adapters import find_adapter
from linattn.convert.evaluate.embeddings import Labelled
from linattn.convert.files import PLAN, load_linearized
from linattn.support.config import Config, option
from linattn.support.documents import as_text, read_documents, read_jsonl, row_text
from linattn.support.options import OptionError, check_device
from linattn.support.progress import without_bars

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, kw_only=True)
class Pretrained(Config):
    """A pretrained model, the text that it reads, and where it runs."""

    model: Path = option(help="Folder of a pretrained model of transformers.", argument=True)
    text: tuple[str, ...] = option(
        (), "Text to read: a file, a folder of .txt files, .jsonl; may be given again.", repeated=True
    )
    device: str = option("", "cpu, cuda or cuda:N.", default_text="cuda where there is one", affects=False)
    precision: Literal["", "fp32", "bf16"] = option(
        "", "Type of the weights: fp32 or bf16.", default_text="bf16 on cuda", rare=True
    )

    def place(self) -> torch.device:
        name = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        check_device(name)
        return torch.device(name)

    def type_of_weights(self) -> str:
        return self.precision or ("bf16" if self.place().type == "cuda" else "fp32")

    def load(self) -> Any:
        return load(self.model, str(self.place()), self.type_of_weights())


@contextmanager
def named(name: str) -> Iterator[None]:
    """Turn errors about a model or a file into errors of the option that names it."""
    try:
        yield
    except (TypeError, ValueError) as error:  # an OptionError among them
        raise OptionError(name, getattr(error, "message", str(error))) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json``, or raise an error that names the folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise OptionError("model", f"must be a folder with config.json and weights, got {folder}")
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise OptionError("model", f"{path} is no JSON: {error}") from error
    return config


def is_linearized(folder: Path) -> bool:
    """Whether the model in a folder was written by ``linattn linearize``."""
    return (folder / "config.json").is_file() and PLAN in read_config(folder)


def sketch(folder: Path) -> Any:
    """Build the model without its weights: its shapes are known, nothing is read or computed."""
    config = read_config(folder)
    if PLAN in config:
        raise OptionError("model", f"{folder} is converted already; give the folder of the model it was made from")
    from transformers import AutoConfig

    with named("model"), without_bars(warnings=False):
        loaded = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = _class_of(config)._from_config(loaded)
        find_adapter(model)
    return model


def load(folder: Path, device: str, precision: str) -> Any:
    """Load the model of a folder, converted or not, onto a device."""
    read = load_linearized if is_linearized(folder) else _class_of(read_config(folder)).from_pretrained
    with without_bars(warnings=False):
        return read(folder, dtype=DTYPES[precision]).to(device).eval()


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def load_tokenizer(folder: Path) -> Any:
    if not has_tokenizer(folder):
        raise OptionError("model", f"{folder} has no tokenizer beside the weights: save the model's own there")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _class_of(config: dict[str, Any]) -> Any:
    """The class that wrote the weights."""
    import transformers

    name = (config.get("architectures") or ["none"])[0]
    if not hasattr(transformers, name):
        raise OptionError("model", f"has the architecture {name}, which this transformers does not have")
    return getattr(transformers, name)


def documents(name: str, source: str) -> list[str]:
    """The texts of a file; what is wrong with it is told under the option ``name``."""
    with named(name):
        return [as_text(document) for document in read_documents(source)]


def labelled(folder: Path) -> Labelled:
    """The texts of ``train.jsonl`` and ``test.jsonl``, with their labels."""
    parts: list[list[Any]] = []
    for path in (folder / "train.jsonl", folder / "test.jsonl"):
        if not path.is_file():
            raise OptionError("probe", f"must be a folder with train.jsonl and test.jsonl, got {folder}")
        with named("probe"):
            rows = list(read_jsonl(path))
            if not all(isinstance(row.get("label"), int) for row in rows):
                raise OptionError("probe", f"each line of {path} must have a text and a label, an integer")
            parts += [[row_text(path, row) for row in rows], [row["label"] for row in rows]]
    return Labelled(*parts)
