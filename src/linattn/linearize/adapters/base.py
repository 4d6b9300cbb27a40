"""What a family of models must say so that its attention can be replaced."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from linattn.linearize.plan import LayerShape

HOOKS = {"forward", "_old_forward", "_hf_hook"}  # what accelerate puts around a module's forward


class Projected(NamedTuple):
    """Queries ``(B, H, T, D)``, keys and values ``(B, H_kv, T, D)``, after norms and rotary positions."""

    q: Tensor
    k: Tensor
    v: Tensor


class Site(NamedTuple):
    """One attention module of a model; ``name`` is its dotted path."""

    name: str
    layer_idx: int
    shape: LayerShape
    convertible: bool = True
    why_not: str | None = None


class Adapter(ABC):
    """The small part of a conversion that differs from family to family; without state of its own.

    ``module`` is the model's attention module, or the :class:`LinearizedAttention` in its place, which has the same
    children and attributes under the same names. ``kwargs`` is what the model hands to its attention, by name.
    """

    model_types: ClassVar[tuple[str, ...]] = ()  # of transformers' configs
    arguments: ClassVar[tuple[str, ...]] = ("hidden_states",)  # names of what the model hands over by position
    lora_targets: ClassVar[tuple[str, ...]] = ()  # projections of the attention, by the last part of their names

    # Rotary positions: softmax does not mind where they start to count, features do. True: from the first real token.
    positions_from_mask: ClassVar[bool] = False

    def matches(self, model: nn.Module) -> bool:
        """Whether the model is of this family."""
        return getattr(getattr(model, "config", None), "model_type", None) in self.model_types

    @abstractmethod
    def sites(self, model: nn.Module) -> list[Site]:
        """All attention modules, in the order of their layers."""

    @abstractmethod
    def project(self, module: Any, hidden: Tensor, **kwargs: Any) -> Projected:
        """Queries, keys and values of ``hidden (B, T, hidden)``."""

    @abstractmethod
    def merge(self, module: Any, out: Tensor, **kwargs: Any) -> Any:
        """From heads ``(B, H, T, D)`` to what the model's attention returns, output projection included."""

    def most_tokens(self, model: Any) -> int | None:
        """Tokens that the model has learned positions for; None: it takes any number of them."""
        return None

    def scale(self, module: Any) -> float:
        """Factor of the logits ``scale q . k``."""
        return float(module.scaling)

    def key_mask(self, **kwargs: Any) -> Tensor | None:
        """``(B, Tk)`` bool, True = real token, of whatever mask the model hands over; None: all are real."""
        return padding_of(kwargs.get("attention_mask"))

    def cache(self, **kwargs: Any) -> Any:
        """The model's cache, or None."""
        return kwargs.get("past_key_values")

    def hidden(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The attention's input and all else by name, however the model hands them over."""
        named = dict(zip(self.arguments, args, strict=False)) | dict(kwargs)
        return named.pop(self.arguments[0]), named

    def children(self, module: nn.Module) -> dict[str, Any]:
        """What the module in the place of ``module`` keeps of it, by name: children, parameters, buffers, attributes.

        A plain attribute is one that ``nn.Module`` does not know by itself.
        """
        left = vars(nn.Module()).keys() | HOOKS
        own = {name: value for name, value in vars(module).items() if name not in left}
        return own | module._buffers | module._parameters | module._modules


def padding_of(mask: Tensor | None) -> Tensor | None:
    """``(B, Tk)`` bool of a padding mask ``(B, Tk)``, or of pairs ``(B, 1, Tq, Tk)``, bool or added to logits.

    The last query of a causal or full mask sees every real key. Any other pattern is refused: a converted layer has
    none, and would see what it was told not to.
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
