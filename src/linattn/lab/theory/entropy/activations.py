"""Queries and keys to be examined: random ones, those inside a model, and the rows of attention they give."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linattn.analysis.attention_map import attention_map
from linattn.analysis.capture import capture
from linattn.mechanisms.base import Mechanism
from linattn.mechanisms.registry import create_mechanism
from linattn.ops.shared.rotation import Rotate
from linattn.support.extras import need
from linattn.support.options import OptionError

SPREAD = 0.7  # standard deviation of the log-length of random queries: one in twenty is 4 times as long as the median
SEEN = 1e-3  # nats between the shortest and the longest queries: a smaller change means that the norm has no effect
LISTENER = "linattn_lab_entropy"  # name of the listening attention in the registry of transformers
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Activations:
    """q ``(B, H, T, D)``, k ``(B, H_kv, T, D)`` and the layer's input x ``(B, T, C)``, in fp64.

    ``own`` is the mechanism that was called with them, as it was trained; None if there is none.
    """

    source: str
    layer: str
    q: Tensor
    k: Tensor
    x: Tensor | None = None
    causal: bool = False
    spatial_shape: tuple[int, int] | None = None
    rotate: Rotate | None = None
    own: Mechanism | None = None

    def times(self, scale: float) -> "Activations":
        """The same activations with all queries multiplied by ``scale``."""
        return replace(self, q=scale * self.q)

    @property
    def counted(self) -> slice:
        """The queries that are counted: all, or if causal the last quarter, which see many keys."""
        return slice(3 * self.q.shape[2] // 4, None) if self.causal else slice(None)

    def map_arguments(self) -> dict[str, Any]:
        """The keyword arguments of ``attention_map``."""
        return {"spatial_shape": self.spatial_shape, "x": self.x, "rotate": self.rotate}


def random_activations(
    batch: int = 2, heads: int = 4, tokens: int = 64, head_dim: int = 32, seed: int = 0, device: str = "cpu"
) -> Activations:
    """Normal keys, and queries in random directions whose lengths are log-normal around ``sqrt(D)``."""
    B, H, T, D = batch, heads, tokens, head_dim
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, x = draw(B, H, T, D), draw(B, H, T, D), draw(B, T, H * D)
    q = D**0.5 * q / q.norm(dim=-1, keepdim=True) * (SPREAD * draw(B, H, T, 1)).exp()
    q, k, x = (t.to(device) for t in (q, k, x))
    return Activations("random", "random", q, k, x)


def captured_activations(model: nn.Module, inputs: Tensor, source: str) -> list[Activations]:
    """What the mechanisms of ``model`` are called with, layer by layer, with the inputs of the layers around them."""
    with _inputs_of_layers(model) as read:
        calls = capture(model, inputs)
    found = []
    for call in calls:
        arguments = call.map_arguments()
        x = arguments["x"] if arguments["x"] is not None else read.get(call.name)
        if x is not None and x.shape[:2] != (call.k.shape[0], call.k.shape[2]):
            x = None  # keys of a reduced plane: there is no input for gates per key
        found.append(
            Activations(
                source, call.name.removesuffix(".mechanism"), call.q.double(), call.k.double(),
                None if x is None else x.double(), call.mechanism.causal, arguments["spatial_shape"],
                arguments["rotate"], call.mechanism,
            )
        )  # fmt: skip
    return found


@contextmanager
def _inputs_of_layers(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the input of every layer that holds a mechanism, by the name that ``capture`` gives to its calls."""
    found: dict[str, Tensor] = {}

    def hook_of(names: tuple[str, str]) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs.get("x")
            if isinstance(x, Tensor):
                found.update(dict.fromkeys(names, x.detach()))

        return hook

    handles = []
    for name, module in model.named_modules():
        if isinstance(getattr(module, "mechanism", None), Mechanism):
            hook = hook_of((name, f"{name}.mechanism"))
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def fitting_mechanism(name: str, activations: Activations, seed: int) -> Mechanism:
    """The untrained mechanism for the shape of the activations, in fp64; ValueError if it does not fit."""
    (_, H, _, D), H_kv = activations.q.shape, activations.k.shape[1]
    options = {"input_dim": activations.x.shape[-1]} if activations.x is not None else {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        mechanism = create_mechanism(
            name, num_heads=H, head_dim=D, num_kv_heads=H_kv, causal=activations.causal, **options
        )
    return mechanism.to(activations.q)


def attention_rows(mechanism: Mechanism, activations: Activations) -> Tensor:
    """Weights ``(B, H, rows, Tk)`` of the queries that are counted."""
    weights = attention_map(mechanism, activations.q, activations.k, **activations.map_arguments())
    return weights[:, :, activations.counted]


# Language models.


def text_activations(folder: Path, text: Path, batch: int, tokens: int, device: str = "cpu") -> list[Activations]:
    """The layers of a model that transformers loads, on the first ``batch x tokens`` tokens of a text."""
    need("a language model", "transformers", "safetensors")
    from transformers import AutoConfig, AutoModel

    from linattn.models.language import LinearAttentionConfig, register_auto_classes

    register_auto_classes()
    own = isinstance(AutoConfig.from_pretrained(folder), LinearAttentionConfig)
    heard: list[Activations] = []
    options: dict[str, Any] = {} if own else {"attn_implementation": _listen(folder.name, heard)}
    with _quiet():
        model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32, **options)
    if model.main_input_name != "input_ids":
        raise OptionError("checkpoint", f"must be a model of text, {type(model).__name__} reads others")
    model.to(device).eval()
    reader = _Reader(model)
    ids = _tokens(folder, text, (batch, tokens), int(model.config.vocab_size)).to(device)
    if own:
        return captured_activations(reader.double(), ids, folder.name)
    with torch.no_grad():
        reader(ids)
    if not heard:
        raise OptionError("checkpoint", f"{type(model).__name__} has no attention that can be listened to")
    return heard


class _Reader(nn.Module):
    """The model without a cache: each mechanism is then called on the whole text, where hooks see it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Any:
        return self.model(input_ids=ids, use_cache=False)


def _tokens(folder: Path, text: Path, shape: tuple[int, int], vocabulary: int) -> Tensor:
    if any((folder / name).exists() for name in TOKENIZER_FILES):
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer.encode(text.read_text(encoding="utf-8"))
    else:
        ids = list(text.read_bytes())
    rows = min(shape[0], len(ids) // shape[1])
    if not rows or max(ids) >= vocabulary:
        have = f"it has {len(ids)}, the largest {max(ids, default=0)} of {vocabulary}"
        raise OptionError("text", f"must have {shape[1]} tokens that the model knows; {have}")
    return torch.tensor(ids[: rows * shape[1]]).unflatten(0, (rows, shape[1]))


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
