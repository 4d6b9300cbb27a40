"""Folders with pretrained models of transformers: what is known before the weights are read, and loading."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from linattn.convert.adapters import find_adapter
from linattn.convert.files import PLAN, load_linearized
from linattn.support.options import OptionError

if TYPE_CHECKING:
    from linattn.models.language.hf.text import TextModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json``, or raise an error that names the folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise OptionError("model", f"must be a folder with config.json and weights, got {folder}")
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise OptionError("model", f"{path} is no JSON: {error}") from error
    return found


def is_linearized(folder: Path) -> bool:
    """Whether the model in a folder was written by ``linattn linearize``."""
    return (folder / "config.json").is_file() and PLAN in read_config(folder)


def sketch(folder: Path) -> Any:
    """Build the model without its weights: its shapes are known, nothing is read or computed."""
    config = read_config(folder)
    if PLAN in config:
        raise OptionError("model", f"{folder} is converted already; give the folder of the model it was made from")
    if "model_type" not in config:
        raise OptionError("model", f"{folder / 'config.json'} has no model_type: it is no model of transformers")
    from transformers import AutoConfig

    with quiet_transformers():
        try:
            loaded = AutoConfig.from_pretrained(folder)
        except ValueError as error:
            raise OptionError("model", f"transformers does not know the model of {folder}: {error}") from error
        with torch.device("meta"):
            model = _class_of(config)._from_config(loaded)
    try:
        find_adapter(model)
    except (TypeError, ValueError) as error:
        raise OptionError("model", str(error)) from error
    return model


def load(folder: Path, device: str, precision: str) -> Any:
    """Load the model of a folder, converted or not, onto a device."""
    with quiet_transformers():
        if is_linearized(folder):
            model = load_linearized(folder, dtype=DTYPES[precision])
        else:
            model = _class_of(read_config(folder)).from_pretrained(folder, dtype=DTYPES[precision])
    return model.to(device).eval()


def load_tokenizer(folder: Path) -> Any:
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise OptionError("model", f"{folder} has no tokenizer beside the weights: save the model's own there")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def load_linearized_text(folder: Path, device: str, precision: str) -> "TextModel":
    """Load a converted language model with its tokenizer."""
    from linattn.models.language.hf.text import TextModel

    model, tokenizer = load(folder, device, precision), load_tokenizer(folder)
    if model.get_output_embeddings() is None:
        raise OptionError("checkpoint", f"{type(model).__name__} writes no text: {folder}")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    return TextModel(model, tokenizer.encode, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), pad)


def _class_of(config: dict[str, Any]) -> Any:
    """The class that wrote the weights."""
    import transformers

    names = config.get("architectures") or []
    found = getattr(transformers, names[0], None) if names else None
    if found is None:
        raise OptionError("model", f"has the architecture {names or 'none'}, which this transformers does not have")
    return found


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bars and warnings of transformers."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
