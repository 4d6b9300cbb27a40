"""``linattn generate``: go on from a prompt with a language model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from linattn.lab.convert.folder import DTYPES, has_tokenizer, is_linearized, load, load_tokenizer, named, read_config
from linattn.lab.screen import Screen
from linattn.lab.train.config import Precision
from linattn.support.config import Config, option
from linattn.support.extras import need
from linattn.support.options import OptionError, check_device
from linattn.support.progress import without_bars

MOST_SEED = 2**32 - 1  # the largest that numpy accepts, which transformers seeds too


@dataclass(frozen=True)
class TextModel:
    """A model, with the functions that turn text into tokens and back."""

    model: Any  # has a method `generate`
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    pad: int


@dataclass(frozen=True, kw_only=True)
class Generate(Config):
    """Go on from a prompt with a language model of this library, or one that `linattn linearize` has written.

    Without a tokenizer in its folder, tokens are bytes.

    Exit code: 0 all right, 2 a bad option or a package that is missing.
    """

    checkpoint: Path = option(help="Folder of a language model, as save_pretrained writes it.", argument=True)
    prompt: tuple[str, ...] = option(
        help="Text to go on from; may be given again: all are continued in one batch.", repeated=True
    )
    max_new_tokens: int = option(200, "Tokens to add.", least=1)
    temperature: float = option(0.0, "Temperature of the draws; 0: always the likeliest token.", least=0)
    top_k: int = option(
        0, "At a temperature above 0: draw from this many of the likeliest tokens; 0: from all.", least=0
    )
    top_p: float = option(
        1.0, "At a temperature above 0: draw from the likeliest with this probability together.", above=0, most=1
    )
    beams: int = option(1, "Beams of a beam search; 1: none.", least=1)
    prefill_chunk: int = option(0, "Read a long prompt in pieces of this many tokens; 0: whole.", least=0)
    seed: int = option(0, "Seed of the draws.", least=0, most=MOST_SEED)
    device: str = option("", "cpu, cuda or cuda:N.", default_text="cuda where there is one")
    precision: Precision | None = option(None, "fp32 or bf16.", default_text="bf16 on cuda")

    def check(self) -> None:
        for name, unset in (("top_k", 0), ("top_p", 1)):
            if not self.temperature and getattr(self, name) != unset:
                raise OptionError(name, "needs a temperature above 0: at 0 the likeliest token is taken, none is drawn")

    def run(self, screen: Screen) -> int:
        need("linattn generate", "transformers", "safetensors")
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        check_device(device)
        with named("checkpoint"), _readable(self.checkpoint), without_bars():
            model = load_text_model(self.checkpoint, device, self.precision or ("fp32" if device == "cpu" else "bf16"))
        texts = [text + more for text, more in zip(self.prompt, self.complete(model), strict=True)]
        if not screen.quiet:
            print(*texts, sep="\n")  # as it is: a Screen would draw what looks like the name of an emoji
        screen.result(texts)
        return 0

    def complete(self, text: TextModel) -> list[str]:
        """Continue each prompt. All are one padded batch, whatever their lengths, and do not affect one another."""
        from transformers import set_seed

        rows = [text.encode(prompt) for prompt in self.prompt]
        if not all(rows):
            raise OptionError("prompt", "must have at least one token to go on from, got an empty one")
        length = max(map(len, rows))
        config: Any = getattr(text.model, "config", None)
        places = config.max_position_embeddings if getattr(config, "model_type", "") == "linattn" else None
        if places is not None and length + self.max_new_tokens - 1 > places:  # the last new token is never read
            raise OptionError(
                "max_new_tokens",
                f"must leave room for a prompt of {length} tokens in max_position_embeddings = {places}, got "
                f"{self.max_new_tokens}",
            )
        ids = torch.tensor([[text.pad] * (length - len(row)) + row for row in rows], device=text.model.device)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=text.model.device)
        settings: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "num_beams": self.beams, "do_sample": False}
        if self.temperature:
            settings |= {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        if self.prefill_chunk:
            settings["prefill_chunk_size"] = self.prefill_chunk
        set_seed(self.seed)
        found: Tensor = text.model.generate(ids, attention_mask=mask, pad_token_id=text.pad, **settings)
        end = text.model.generation_config.eos_token_id
        ends = end if isinstance(end, list) else [end]  # padding behind them may be a byte like any other
        return [
            text.decode(list(takewhile(lambda token: token not in ends, row))) for row in found[:, length:].tolist()
        ]


def load_text_model(folder: Path, device: str, precision: str) -> TextModel:
    """The model and the tokenizer of a folder; without a tokenizer beside a model of this library, tokens are bytes."""
    converted = is_linearized(folder)
    if converted:
        model = load(folder, device, precision)
        if model.get_output_embeddings() is None:
            raise OptionError("checkpoint", f"{type(model).__name__} writes no text: {folder}")
    else:
        model = _load_causal(folder, precision).to(device).eval()
    if converted or has_tokenizer(folder):
        tokenizer: Any = load_tokenizer(folder)
        # None are added to the prompts of models that `linattn train` made: an end would part text and continuation.
        encode = lambda text: tokenizer.encode(text, add_special_tokens=converted)  # noqa: E731
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
        return TextModel(model, encode, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), pad)
    size = model.config.vocab_size
    if size < 256:
        raise OptionError("checkpoint", f"has no tokenizer, and {size} tokens are too few for bytes: {folder}")
    return TextModel(model, lambda text: list(text.encode()), _from_bytes, model.config.pad_token_id or 0)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn what transformers raises over a folder into an error that names it."""
    from safetensors import SafetensorError

    try:
        yield
    except OptionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise OptionError("checkpoint", f"cannot be read as a language model: {folder}: {error}") from error


def _load_causal(folder: Path, precision: str) -> Any:
    """A causal language model. A folder that lacks weights is refused, as these would be drawn at random."""
    from transformers import AutoModelForCausalLM

    from linattn.models.language import register_auto_classes

    register_auto_classes()
    if not read_config(folder).get("causal", True):
        raise OptionError("checkpoint", f"must be a causal language model, and this is an encoder: {folder}")
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[precision], output_loading_info=True)
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise OptionError("checkpoint", f"must be a language model with all its weights; {missing[0]} is not there")
    return model


def _from_bytes(ids: list[int]) -> str:
    """The text of those ids that are bytes; a character cut in the middle is shown as a replacement mark."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")
