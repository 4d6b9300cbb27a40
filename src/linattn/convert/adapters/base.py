"""The interface through which a family of models lets its attention be replaced."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from linattn.convert.plan import LayerShape

HOOKS = {"forward", "_old_forward", "_hf_hook"}  # attributes that accelerate adds to a module when it wraps its forward


class Projected(NamedTuple):
    """Queries ``(B, H, T, D)``, keys and values ``(B, H_kv, T, D)``, after norms and rotary positions."""

    q: Tensor
    k: Tensor
    v: Tensor


class Site(NamedTuple):
    """One attention module of a model; ``name`` is its dotted path, ``why_not`` the reason if it is not convertible."""

    name: str
    layer_idx: int
    shape: LayerShape
    convertible: bool = True
    why_not: str | None = None


class Adapter(ABC):
    """The part of a conversion that differs between families of models. Adapters hold no state.

    ``module`` is the model's attention module, or the :class:`ReplacedAttention` in its place, which has the same
    children and attributes under the same names. ``kwargs`` holds what the model passes to its attention, by name.
    """

    model_types: ClassVar[tuple[str, ...]] = ()  # values of ``model_type`` in configs of transformers
    arguments: ClassVar[tuple[str, ...]] = ("hidden_states",)  # arguments that the model passes by position
    lora_targets: ClassVar[tuple[str, ...]] = ()  # projections of the attention, by the last part of their names
    # Classes of the model's blocks (or of what they inherit), and the path of the attention inside of one.
    blocks: ClassVar[tuple[str, ...]] = ()
    inside: ClassVar[str] = ""

    # Rotary positions: softmax does not depend on where they start, features do. True: start at the first real token.
    positions_from_mask: ClassVar[bool] = False

    def matches(self, model: nn.Module) -> bool:
        """Whether the model is of this family."""
        return getattr(getattr(model, "config", None), "model_type", None) in self.model_types

    def sites(self, model: nn.Module) -> list[Site]:
        """All attention modules of the model, in the order of its layers, converted or not."""
        found: list[Site] = []
        for name, block in model.named_modules():
            if is_of(block, *self.blocks):
                path = ".".join(filter(None, (name, self.inside)))  # the model itself has the empty path
                found.append(Site(path, len(found), self.shape(model.get_submodule(path))))
        return found

    def shape(self, module: Any) -> LayerShape:
        """The shape of an attention module."""
        raise NotImplementedError(f"{type(self).__name__} must have shape(module), or sites(model)")

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

    def cache(self, **kwargs: Any) -> Any:
        """The cache that the model passes to its attention, or None."""
        cache = kwargs.get("past_key_values")
        return getattr(cache, "self_attention_cache", cache)  # a decoder with an encoder has two caches

    def hidden(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The attention's input, and all other arguments by name, however the model passes them."""
        named = dict(zip(self.arguments, args, strict=False)) | dict(kwargs)
        return named.pop(self.arguments[0]), named

    def children(self, module: nn.Module) -> dict[str, Any]:
        """What the module that replaces ``module`` takes over: children, parameters, buffers and attributes, by name.

        Plain attributes are those that a bare ``nn.Module`` does not have.
        """
        left = vars(nn.Module()).keys() | HOOKS
        own = {name: value for name, value in vars(module).items() if name not in left}
        return own | module._buffers | module._parameters | module._modules


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
