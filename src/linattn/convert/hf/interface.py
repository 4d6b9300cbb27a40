"""Mechanisms as attention functions of transformers, to try one on a model without converting it.

    >>> from linattn.convert.hf import interface
    >>> "linattn_elu" in interface.register()
    True

Then ``model.set_attn_implementation("linattn_elu")``, or ``from_pretrained(..., attn_implementation="linattn_elu")``.

A model appends its keys to the cache before it calls such a function, and passes all of them: **the cache still grows
with the text, and every decoded token costs as much as the text before it.** Nothing is trained either. This is for
evaluation; ``linattn.convert`` converts a model to one with a state of fixed size.
"""

import math
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from linattn.convert.core import MechanismCore
from linattn.convert.hf.converted import causal_in, padding_mask, refuse_options
from linattn.convert.plan import LayerPlan, LayerShape
from linattn.mechanisms.registry import list_mechanisms, mechanism_info

PREFIX = "linattn_"
# What some models ask of attention and no mechanism has: terms inside the softmax, offsets of packed sequences.
UNKNOWN = ("softcap", "s_aux", "position_bias", "cu_seq_lens_q", "head_mask")


def register(options: Mapping[str, Mapping[str, Any]] | None = None) -> list[str]:
    """Register ``linattn_<mechanism>`` with transformers for every registered mechanism; returns these names.

    Mechanisms that compute gates from the layer's input, which attention functions do not receive, have a name too, but
    raise an error that says so when they are used.

    Args:
        options: of mechanisms, by their names: ``{"mirror": {"reflections": 2}}``.

    A mechanism's parameters keep their initial values, which are the same in every run. They are kept per attention
    module outside the model: they are not among its parameters, do not train and are not saved.
    """
    options = options or {}
    for name in options:
        mechanism_info(name)  # refuses an unknown name
    mechanisms = list_mechanisms()
    for name in mechanisms:
        AttentionInterface.register(PREFIX + name, MechanismAttention(name, dict(options.get(name, {}))))
        AttentionMaskInterface.register(PREFIX + name, padding_mask)
    return [PREFIX + name for name in mechanisms]


class MechanismAttention:
    """An attention function of transformers that runs one mechanism: a core, as in a converted layer, for each module.

    ``(module, q (B, H, Tq, D), k (B, H_kv, Tk, D), v, mask (B, seen)) -> (output (B, Tq, H, D), None)``; for a causal
    module the queries belong to the last Tq of the tokens seen.
    """

    def __init__(self, mechanism: str, options: dict[str, Any]) -> None:
        self.mechanism, self.options = mechanism, options
        self.built: WeakKeyDictionary[nn.Module, MechanismCore] = WeakKeyDictionary()

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None, **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        self._refuse(module, dropout, attention_mask, others)
        causal = causal_in(module, is_causal)
        key_mask = None
        if attention_mask is not None:
            key, value = (x[:, :, : attention_mask.shape[1]] for x in (key, value))  # a static cache has empty slots
            key_mask = attention_mask.bool()
        # Mechanisms that scale their scores use the factor D^-0.5.
        factor = 1.0 if scaling is None else scaling * math.sqrt(query.shape[3])
        if not math.isclose(factor, 1.0):
            query = query * factor
        length, before = query.shape[2], key.shape[2] - query.shape[2]
        if causal and before:  # earlier tokens get queries too, whose output is dropped
            query = F.pad(query, (0, 0, before, 0))
        output = self._core(module, query, key, causal)(query, key, value, key_mask=key_mask)
        return output[:, :, -length:].transpose(1, 2).contiguous(), None

    def _core(self, module: nn.Module, query: Tensor, key: Tensor, causal: bool) -> MechanismCore:
        core = self.built.get(module)
        if core is None or core.shape.causal != causal:
            shape = LayerShape(query.shape[1], key.shape[1], query.shape[3], query.shape[1] * query.shape[3], causal)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(getattr(module, "layer_idx", None) or 0)
                core = MechanismCore(LayerPlan("mechanism", mechanism=self.mechanism, options=self.options), shape)
            core = self.built[module] = core.requires_grad_(False).eval()
        return core.to(device=query.device, dtype=query.dtype)

    def _refuse(self, module: nn.Module, dropout: float, mask: Tensor | None, others: dict[str, Any]) -> None:
        name = PREFIX + self.mechanism
        if mechanism_info(self.mechanism).uses_input:
            raise ValueError(
                f"attn_implementation={name!r}: {self.mechanism!r} takes its gates from the layer's input, which "
                f"attention functions of transformers are not given; convert the model instead: "
                f"linattn.linearize(model, method='features', mechanism={self.mechanism!r})"
            )
        if dropout:
            raise ValueError(f"{name} has no attention weights to drop: set the model's attention dropout to 0")
        weights = others.get("output_attentions")
        if getattr(getattr(module, "config", None), "output_attentions", False) if weights is None else weights:
            raise ValueError(f"output_attentions=True is not possible: {name} never has its weights")
        if mask is not None and mask.ndim != 2:
            raise ValueError(f"{name} needs a 2-D attention_mask (B, T), True = real token, got {tuple(mask.shape)}")
        refuse_options(name, UNKNOWN, others)
