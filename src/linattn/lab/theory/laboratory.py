"""What laboratories share: options with two defaults, and a pretrained model with a text to read."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn.lab.convert.folder import has_tokenizer, load_tokenizer
from linattn.lab.experiment import Experiment
from linattn.support.config import Option, option
from linattn.support.extras import need
from linattn.support.options import OptionError
from linattn.support.progress import without_bars


def sized(usual: Any, quick: Any, help: str, **more: Any) -> Any:
    """A field of a :class:`Laboratory` with one default, and another one with ``--quick``."""
    words = [",".join(map(str, size)) if isinstance(size, tuple) else str(size) for size in (usual, quick)]
    rule = Option(help=help, default_text=f"{words[0]}, with --quick {words[1]}", **more)
    return field(default=None, metadata={"option": rule, "sizes": (usual, quick)})


@dataclass(frozen=True, kw_only=True)
class Laboratory(Experiment):
    """The base of laboratories, whose fields may be made by :func:`sized`; what is given wins over ``quick``."""

    quick: bool = option(False, "Small: shows that everything runs.", affects=False)

    def __post_init__(self) -> None:
        for own in fields(self):
            if "sizes" in own.metadata and getattr(self, own.name) is None:
                object.__setattr__(self, own.name, own.metadata["sizes"][self.quick])
        super().__post_init__()


def model_and_tokens(folder: Path, text: Path, rows: int, length: int) -> tuple[Any, Tensor]:
    """A model that transformers loads, or one of this library, in fp32, and the first tokens ``(rows, length)`` of a
    text, or fewer rows. Where there is no tokenizer, a token is a byte."""
    need("a pretrained model", "transformers", "safetensors")
    from transformers import AutoModel

    from linattn.models.language import register_auto_classes

    register_auto_classes()
    with without_bars(warnings=False):
        model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    length = min(length, getattr(model.config, "max_position_embeddings", None) or length)
    if has_tokenizer(folder):
        ids = load_tokenizer(folder).encode(text.read_text(encoding="utf-8"), verbose=False)
    else:
        ids = list(text.read_bytes())
    rows = min(rows, len(ids) // length)
    if not rows or max(ids) >= model.config.vocab_size:
        have = f"it has {len(ids)}, the largest {max(ids, default=0)} of {model.config.vocab_size}"
        raise OptionError("text", f"must have {length} tokens that the model knows; {have}")
    return model, torch.tensor(ids[: rows * length]).view(rows, length)
