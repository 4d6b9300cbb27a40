"""Adapters, one for each family of models; :func:`find_adapter` returns the one that fits a model."""

from torch import nn

from linattn.convert.adapters.base import Adapter
from linattn.convert.adapters.decoders import DECODERS
from linattn.convert.adapters.encoders import ENCODERS
from linattn.convert.adapters.timm import TimmAttention

_ADAPTERS: list[Adapter] = [*DECODERS, *ENCODERS, TimmAttention()]

HOW_TO_WRITE_ONE = """no adapter knows {family}. To write one, inherit linattn.convert.adapters.base.Adapter:
  model_types  names the family ({family_type!r}), or write matches(model)
  blocks       names the classes of its blocks, inside the path of the attention in one, shape its shape; or write sites
  project      makes q (B, H, T, D), k and v (B, H_kv, T, D) of the module's input, after norms and rotary positions
  merge        makes of heads (B, H, T, D) what the module returns, with its output projection
and hand it to linattn.convert.adapters.register_adapter(YourAdapter()). Families known so far: {known}"""


def register_adapter(adapter: Adapter) -> None:
    """Make a family's adapter known to :func:`find_adapter`; the one registered last is asked first."""
    if not isinstance(adapter, Adapter):
        raise TypeError(f"adapter must be an instance of Adapter, got {adapter!r}")
    _ADAPTERS.insert(0, adapter)


def find_adapter(model: nn.Module) -> Adapter:
    """The adapter of the model's family; for an unknown family, a ValueError that says how to write one."""
    for adapter in _ADAPTERS:
        if adapter.matches(model):
            return adapter
    kind = getattr(getattr(model, "config", None), "model_type", None)
    known = ", ".join(sorted({name for adapter in _ADAPTERS for name in adapter.model_types}))
    family = f"{type(model).__name__} (model_type {kind!r})"
    raise ValueError(HOW_TO_WRITE_ONE.format(family=family, family_type=kind, known=known))
