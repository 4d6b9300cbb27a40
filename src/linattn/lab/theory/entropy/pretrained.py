"""Activations of a language model in a folder, from this library or any that transformers loads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from linattn.lab.theory.entropy.activations import Activations, captured_activations
from linattn.lab.theory.entropy.settings import EntropyConfig
from linattn.support.extras import need
from linattn.support.options import OptionError

LISTENER = "linattn_lab_entropy"  # name of the listening attention in the registry of transformers
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def text_activations(config: EntropyConfig) -> list[list[Activations]]:
    """The layers of the model on the first ``batch x tokens`` tokens of the text."""
    need("a language model", "transformers", "safetensors")
    from transformers import AutoConfig, AutoModel

    from linattn.models.language import LinearAttentionConfig, register_auto_classes

    register_auto_classes()
    assert config.checkpoint is not None
    own = isinstance(AutoConfig.from_pretrained(config.checkpoint), LinearAttentionConfig)
    heard: list[Activations] = []
    options: dict[str, Any] = {} if own else {"attn_implementation": _listen(config.checkpoint.name, heard)}
    with _quiet():
        model: Any = AutoModel.from_pretrained(config.checkpoint, dtype=torch.float32, **options)
    if model.main_input_name != "input_ids":
        raise OptionError("checkpoint", f"must be a model of text, {type(model).__name__} reads others")
    model.to(config.device).eval()
    reader = _Reader(model)
    ids = _tokens(config, int(model.config.vocab_size)).to(config.device)
    if own:
        return [captured_activations(reader.double(), ids, config.checkpoint.name)]
    with torch.no_grad():
        reader(ids)
    if not heard:
        raise OptionError("checkpoint", f"{type(model).__name__} has no attention that can be listened to")
    return [heard]


class _Reader(nn.Module):
    """The model without a cache: each mechanism is then called on the whole text, where hooks see it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Any:
        return self.model(input_ids=ids, use_cache=False)


def _tokens(config: EntropyConfig, vocabulary: int) -> Tensor:
    assert config.checkpoint is not None
    assert config.text is not None
    if any((config.checkpoint / name).exists() for name in TOKENIZER_FILES):
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(config.checkpoint)
        ids = tokenizer.encode(config.text.read_text(encoding="utf-8"))
    else:
        ids = list(config.text.read_bytes())
    rows = min(config.batch, len(ids) // config.tokens)
    if not rows or max(ids) >= vocabulary:
        have = f"it has {len(ids)}, the largest {max(ids, default=0)} of {vocabulary}"
        raise OptionError("text", f"must have {config.tokens} tokens that the model knows; {have}")
    return torch.tensor(ids[: rows * config.tokens]).unflatten(0, (rows, config.tokens))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers, which reports that the head is left out, and shows a bar."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def _listen(source: str, heard: list[Activations]) -> str:
    """Register softmax attention that records its queries, times the model's scale, and keys; returns its name."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Any:
        width = query.shape[-1]
        scale = options.get("scaling") or width**-0.5
        causal = bool(getattr(module, "is_causal", True)) and query.shape[2] > 1
        q = query.detach().double() * (scale * width**0.5)
        heard.append(Activations(source, f"layer {len(heard)}", q, key.detach().double(), causal=causal))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    AttentionInterface.register(LISTENER, attend)
    return LISTENER
