"""Generation from text to text with a model in a folder; without a tokenizer beside it, tokens are bytes."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

from linattn.models.language.hf.heads import LinearAttentionForCausalLM
from linattn.support.options import OptionError

MOST_SEED = 2**32 - 1  # the largest that numpy accepts, which transformers seeds too
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Sampling:
    """How next tokens are chosen. ``temperature`` 0: the likeliest, always; ``top_k`` 0, ``top_p`` 1: draw from all."""

    max_new_tokens: int = 200
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    beams: int = 1
    prefill_chunk: int = 0
    seed: int = 0

    def check(self) -> None:
        """Raise OptionError that names the option and what is allowed."""
        for name, least in (("max_new_tokens", 1), ("top_k", 0), ("beams", 1), ("prefill_chunk", 0)):
            if getattr(self, name) < least:
                raise OptionError(name, f"must be an integer >= {least}, got {getattr(self, name)}")
        if not 0 <= self.temperature < math.inf:
            raise OptionError("temperature", f"must be a number >= 0, got {self.temperature:g}")
        if not 0 < self.top_p <= 1:
            raise OptionError("top_p", f"must be above 0 and at most 1, got {self.top_p:g}")
        for name, unset in (("top_k", 0), ("top_p", 1)):
            if not self.temperature and getattr(self, name) != unset:
                raise OptionError(name, "needs a temperature above 0: at 0 the likeliest token is taken, none is drawn")
        if not 0 <= self.seed <= MOST_SEED:
            raise OptionError("seed", f"must be an integer from 0 to {MOST_SEED}, got {self.seed}")

    def options(self) -> dict[str, Any]:
        """Arguments of ``generate``."""
        found: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "num_beams": self.beams, "do_sample": False}
        if self.temperature:
            found |= {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return found | ({"prefill_chunk_size": self.prefill_chunk} if self.prefill_chunk else {})


@dataclass(frozen=True)
class TextModel:
    """A model, with the functions that turn text into tokens and back."""

    model: Any  # has a method `generate`
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    pad: int

    def complete(self, prompts: list[str], sampling: Sampling) -> list[str]:
        """Continue each prompt. All are one padded batch, whatever their lengths, and do not affect one another."""
        rows = [self.encode(prompt) for prompt in prompts]
        if not all(rows):
            raise OptionError("prompt", "must have at least one token to go on from, got an empty one")
        length = max(map(len, rows))
        self._check_places(length, sampling.max_new_tokens)
        ids = torch.tensor([[self.pad] * (length - len(row)) + row for row in rows], device=self.model.device)
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=self.model.device)
        set_seed(sampling.seed)
        found: Tensor = self.model.generate(ids, attention_mask=mask, pad_token_id=self.pad, **sampling.options())
        return [self.decode(self._until_end(row)) for row in found[:, length:].tolist()]

    def _check_places(self, length: int, new: int) -> None:
        """Raise if there are too few learned positions; the last new token is never read and needs none."""
        if not isinstance(self.model, LinearAttentionForCausalLM):
            return  # for other models this number is no hard limit
        places = self.model.config.max_position_embeddings
        if places is not None and length + new - 1 > places:
            raise OptionError(
                "max_new_tokens",
                f"must leave room for a prompt of {length} tokens in max_position_embeddings = {places}, got {new}",
            )

    def _until_end(self, ids: list[int]) -> list[int]:
        """The ids before the first end token; padding after it may be a byte like any other."""
        end = self.model.generation_config.eos_token_id
        ends = end if isinstance(end, list) else [end]
        return list(takewhile(lambda token: token not in ends, ids))


def load_text_model(folder: Path, device: str, precision: str) -> TextModel:
    """Load the model and the tokenizer of a folder; without a tokenizer, tokens are bytes.

    A folder that lacks weights of a causal language model is refused, as these would be drawn at random.
    """
    if not (folder / "config.json").is_file():
        raise OptionError("checkpoint", f"must be a folder with config.json and weights, got {folder}")
    with _named(folder):
        config = AutoConfig.from_pretrained(folder)
    if not getattr(config, "causal", True):
        raise OptionError("checkpoint", f"must be a causal language model, and this is an encoder: {folder}")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    with _named(folder):
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise OptionError("checkpoint", f"must be a language model with all its weights; {missing[0]} is not there")
    model.to(device).eval()
    if any((folder / name).exists() for name in TOKENIZER_FILES):
        with _named(folder):
            tokenizer: Any = AutoTokenizer.from_pretrained(folder)

        def encode(text: str) -> list[int]:
            # No special tokens, as in `linattn train`: an end token would separate the prompt from its continuation.
            found: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return found

        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
        return TextModel(model, encode, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), pad)
    size = model.config.vocab_size
    if size < 256:
        raise OptionError("checkpoint", f"has no tokenizer, and {size} tokens are too few for bytes: {folder}")
    return TextModel(model, lambda text: list(text.encode()), _from_bytes, model.config.pad_token_id or 0)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Turn the errors of transformers about a folder into errors of the option ``checkpoint``."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise OptionError("checkpoint", f"cannot be read as a language model: {folder}: {error}") from error


def _from_bytes(ids: list[int]) -> str:
    """The text of those ids that are bytes; a character cut in the middle is shown as a replacement mark."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")
