"""The interface through which a family of models lets its attention be replaced, and the table of families."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from linattn.convert.plan import LayerShape

HOW_TO_WRITE_ONE = """no adapter knows {family}. A family whose attention has projections of q, k, v and the output is a
row like those of linattn.convert.adapters.families.FAMILIES; any other inherits Adapter from there and has
  sites    the attention modules, with their shapes; matches says whether a model is of the family
  project  makes q (B, H, T, D), k and v (B, H_kv, T, D) of the module's input, after norms and rotary positions
  merge    makes of heads (B, H, T, D) what the module returns, with its output projection
Hand it to linattn.convert.adapters.register_adapter(...). Families known so far: {known}"""


Projected = tuple[Tensor, Tensor, Tensor]
"""Queries ``(B, H, T, D)``, keys and values ``(B, H_kv, T, D)``, after norms and rotary positions."""


class Site(NamedTuple):
    """One attention module of a model; ``name`` is its dotted path, ``why_not`` the reason if it is not convertible."""

    name: str
    layer_idx: int
    shape: LayerShape
    why_not: str | None = None


class Adapter(ABC):
    """The part of a conversion that differs between families of models. Adapters hold no state.

    ``module`` is the model's attention module, or the :class:`ReplacedAttention` in its place, which has the same
    children and attributes under the same names. ``kwargs`` holds what the model passes to its attention, by name.
    """

    model_types: tuple[str, ...] = ()  # values of ``model_type`` in configs of transformers
    arguments: tuple[str, ...] = ("hidden_states",)  # arguments that the model passes by position
    projections: tuple[str, ...] = ()  # of the attention, by name: those that fine-tuning adapts
    # Rotary positions: softmax does not depend on where they start, features do. True: start at the first real token.
    rotary: bool = False

    def matches(self, model: nn.Module) -> bool:
        """Whether the model is of this family."""
        return getattr(getattr(model, "config", None), "model_type", None) in self.model_types

    @abstractmethod
    def sites(self, model: nn.Module) -> list[Site]:
        """All attention modules of the model, in the order of its layers, converted or not."""

    @abstractmethod
    def project(self, module: Any, hidden: Tensor, **kwargs: Any) -> Projected:
        """Compute queries, keys and values from ``hidden (B, T, hidden)``."""

    @abstractmethod
    def merge(self, module: Any, out: Tensor, **kwargs: Any) -> Any:
        """Turn heads ``(B, H, T, D)`` into what the model's attention returns, output projection included."""

    def most_tokens(self, model: Any) -> int | None:
        """How many tokens the model has learned positions for; None: there is no limit."""
        return None

    def scale(self, module: Any) -> float:
        """The factor ``scale`` of the logits ``scale q . k``."""
        return float(module.scaling)

    def key_mask(self, **kwargs: Any) -> Tensor | None:
        """Mask of keys ``(B, Tk)``, bool, True = real token, from the mask that the model passes; None: all real."""
        return padding_of(kwargs.get("attention_mask"))

    def hidden(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The attention's input, and all other arguments by name, however the model passes them."""
        named = dict(zip(self.arguments, args, strict=False)) | dict(kwargs)
        return named.pop(self.arguments[0]), named


@dataclass(frozen=True, kw_only=True)
class Family(Adapter):
    """A family of transformers whose attention is projections of q, k and v, and mostly one of the output.

    ``q, k, v = W_q x, W_k x, W_v x`` or parts of one ``W x``; norms of q and k and rotary positions where they exist;
    ``y = W_o o``. Layers that see a window only stay as they are.

    Attributes:
        inside: the end of the path of an attention module, which also has the first of the ``projections``.
        output: name of the output's projection; empty: it lies outside of the attention.
        shared: what one projection of q, k and v is cut into first: ``"heads"`` or the three ``"parts"``.
        positions: ``"learned"``, or learned for numbers that begin ``"after padding"``, the id of the padding.
    """

    model_types: tuple[str, ...]
    inside: str
    projections: tuple[str, ...]
    output: str = ""
    arguments: tuple[str, ...] = ("hidden_states", "attention_mask", "past_key_values")
    rotary: bool = False
    shared: Literal["", "heads", "parts"] = ""
    positions: Literal["", "learned", "after padding"] = ""

    def sites(self, model: nn.Module) -> list[Site]:
        found: list[Site] = []
        for name, module in model.named_modules():
            if f".{name}".endswith(f".{self.inside}") and hasattr(module, self.projections[0]):
                found.append(Site(name, len(found), self.shape(module), why_not(module)))
        return found

    def shape(self, module: Any) -> LayerShape:
        config, causal = module.config, bool(getattr(module, "is_causal", True))
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return LayerShape(heads, kv_heads, head_width(module), config.hidden_size, causal)

    def project(self, module: Any, hidden: Tensor, **kwargs: Any) -> Projected:
        width = head_width(module)
        parts = [getattr(module, name)(hidden) for name in self.projections if name != self.output]
        if self.shared == "heads":
            q, k, v = split_heads(parts[0], 3 * width).chunk(3, dim=-1)
        else:
            q, k, v = (split_heads(part, width) for part in (parts[0].chunk(3, -1) if self.shared else parts))
        if hasattr(module, "q_norm"):
            q, k = module.q_norm(q), module.k_norm(k)
        if not self.rotary:
            return q, k, v
        cos, sin = (part.unsqueeze(1) for part in kwargs["position_embeddings"])
        if hidden.shape[1] == 1:  # for one token the number of operations decides: all heads at once
            q, k = rotated(torch.cat([q, k], 1), cos, sin).split([q.shape[1], k.shape[1]], 1)
            return q, k, v
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    def merge(self, module: Any, out: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        y = join_heads(out)
        if self.output:
            y = getattr(module, self.output)(y)
        return (module.resid_dropout(y) if hasattr(module, "resid_dropout") else y), None

    def most_tokens(self, model: Any) -> int | None:
        if not self.positions:
            return None
        begins = model.config.pad_token_id + 1 if self.positions == "after padding" else 0
        return int(model.config.max_position_embeddings) - begins


SEPARATE = ("q_proj", "k_proj", "v_proj", "o_proj")
BERT: dict[str, Any] = {"inside": "attention.self", "projections": ("query", "key", "value")}
FAMILIES = (
    Family(
        model_types=("llama", "mistral", "qwen2", "qwen3", "gemma3_text"), inside="self_attn", projections=SEPARATE,
        output="o_proj", rotary=True,
        arguments=("hidden_states", "position_embeddings", "attention_mask", "past_key_values"),
    ),
    Family(
        model_types=("gpt_neox",), inside="attention", projections=("query_key_value", "dense"), output="dense",
        rotary=True, shared="heads",
        arguments=("hidden_states", "attention_mask", "layer_past", "position_embeddings"),
    ),
    Family(
        model_types=("gpt2",), inside="attn", projections=("c_attn", "c_proj"), output="c_proj", shared="parts",
        arguments=("hidden_states", "past_key_values", "attention_mask"), positions="learned",
    ),
    Family(model_types=("bert", "electra"), positions="learned", **BERT),
    Family(model_types=("roberta", "xlm-roberta", "camembert"), positions="after padding", **BERT),
    Family(model_types=("vit",), inside="attention", projections=SEPARATE, output="o_proj"),
)  # fmt: skip
_ADAPTERS: list[Adapter] = [*FAMILIES]


def register_adapter(adapter: Adapter) -> None:
    """Make a family's adapter known to :func:`find_adapter`; the one registered last is asked first."""
    _ADAPTERS.insert(0, adapter)


def find_adapter(model: nn.Module) -> Adapter:
    """The adapter of the model's family; for an unknown family, a ValueError that says how to write one."""
    from linattn.convert.adapters.timm import TimmAttention

    for adapter in (*_ADAPTERS, TimmAttention()):
        if adapter.matches(model):
            return adapter
    kind = getattr(getattr(model, "config", None), "model_type", None)
    known = ", ".join(sorted({name for adapter in _ADAPTERS for name in adapter.model_types}))
    raise ValueError(HOW_TO_WRITE_ONE.format(family=f"{type(model).__name__} (model_type {kind!r})", known=known))


def convertible_sites(model: nn.Module) -> dict[int, Site]:
    """The attention layers that can be converted, by number; raises if there are none."""
    sites = find_adapter(model).sites(model)
    found = {site.layer_idx: site for site in sites if site.why_not is None}
    if not found:
        reasons = {str(site.why_not) for site in sites}
        raise ValueError(f"no layer of {type(model).__name__} can be converted: {'; '.join(sorted(reasons))}")
    return found


def why_not(module: Any) -> str | None:
    """Why an attention cannot be converted; None: it can."""
    if getattr(module, "attn_logit_softcapping", None) is not None:
        return "its logits are capped by a tanh, which exact attention here does not have"
    window = getattr(module, "sliding_window", None)
    if window is None and not hasattr(module, "layer_type"):  # Mistral has one setting for all layers
        window = getattr(module.config, "sliding_window", None)
    return f"it sees a window of {window} tokens only, so its cache has a fixed size already" if window else None


def head_width(module: Any) -> int:
    """Channels of a head, under whichever name the attention has them."""
    names = ("head_dim", "head_size", "attention_head_size")
    return next(int(getattr(module, name)) for name in names if hasattr(module, name))


def padding_of(mask: Tensor | None) -> Tensor | None:
    """Read which keys are real, ``(B, Tk)`` bool, from a padding mask ``(B, Tk)`` or a mask of pairs.

    Masks of pairs are ``(B, 1, Tq, Tk)``, bool or to be added to the logits. In a causal or a full mask the last query
    sees every real key. Any other pattern is refused: converted layers apply no pattern of pairs, so their queries
    would see keys that the mask hides.
    """
    if mask is None or mask.ndim == 2:
        return None if mask is None else mask.bool()
    pairs = mask > -1 if mask.dtype.is_floating_point else mask.bool()
    real = pairs[:, :1, -1:]
    past = torch.ones(pairs.shape[-2:], dtype=torch.bool, device=mask.device).tril(pairs.shape[-1] - pairs.shape[-2])
    if not (bool((pairs == real).all()) or bool((pairs == (real & past)).all())):
        raise ValueError(
            "attention_mask must be (B, T), True = real token; converted layers know no other pattern than that and "
            "the causal one: no packed sequences, no windows and no masks of pairs"
        )
    return real[:, 0, 0]


def is_of(module: object, *class_names: str, package: str = "") -> bool:
    """Whether a module's class, or one that it inherits, has one of these names and is defined in ``package``."""
    return any(c.__name__ in class_names and c.__module__.startswith(package) for c in type(module).__mro__)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """``(B, T, H D) -> (B, H, T, D)``."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """``(B, H, T, D) -> (B, T, H D)``."""
    return x.transpose(1, 2).flatten(2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R channels of x ``(B, H, T, D)`` by the angles of cos and sin ``(B, 1, T, R)``.

    Channel i is paired with channel ``i + R / 2``.
    """
    width = cos.shape[-1]
    first, second = x[..., :width].chunk(2, dim=-1)
    turned = x[..., :width] * cos + torch.cat([-second, first], dim=-1) * sin
    return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], dim=-1)
