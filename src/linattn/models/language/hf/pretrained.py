"""What all heads share: initialisation, checks of keyword arguments, and the form of outputs."""

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from linattn.layers.canon import Canon
from linattn.models.language.attention import SequenceAttention
from linattn.models.language.hf.config import LinearAttentionConfig
from linattn.models.language.hf.packing import PACKING

LOSS_OPTIONS = (
    "num_items_in_batch",
    "shift_labels",
    "ignore_index",
)  # options of transformers' losses; Trainer passes the first


class LinearAttentionPreTrainedModel(PreTrainedModel):
    """Base class of all models, with the initialisation of their weights."""

    config_class = LinearAttentionConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["CachedBlock"]  # noqa: RUF012, the type that transformers gives it
    _is_stateful = True  # a state cannot be cut back: tells transformers to refuse assisted generation

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Canon):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialise mechanisms first, each as a whole: only they know how their parameters and buffers start."""
        for module in self.modules():
            if isinstance(module, SequenceAttention) and not getattr(module.mechanism, "_is_hf_initialized", False):
                _start_mechanism(module)
        super().initialize_weights()

    def _loss_options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The options of the loss among a head's ``**kwargs``.

        A head that takes ``cu_seqlens`` also allows its other names. Anything else is refused.
        """
        named = list(inspect.signature(self.forward).parameters)[:-1]
        known = (*LOSS_OPTIONS, *(PACKING if "cu_seqlens" in named else ()))
        for name, value in kwargs.items():
            if name not in known and value is not None:
                raise TypeError(f"{type(self).__name__} takes no {name!r}; it takes {', '.join([*named, *known])}")
        return {name: value for name, value in kwargs.items() if name in LOSS_OPTIONS}

    def _answer(self, result: ModelOutput, return_dict: bool | None) -> Any:
        """The output with named fields, or as a tuple if ``return_dict``, or by default the config, is False."""
        by_name = self.config.return_dict if return_dict is None else return_dict
        return result if by_name else result.to_tuple()


def _start_mechanism(attention: SequenceAttention) -> None:
    """Give tensors that were not loaded from a file the values of a new mechanism, and mark all as initialised."""
    mechanism = attention.mechanism
    tensors = dict(mechanism.named_parameters()) | dict(mechanism.named_buffers())
    missing = {name: x for name, x in tensors.items() if not getattr(x, "_is_hf_initialized", False)}
    if missing:
        with torch.device("cpu"):
            fresh = attention.new_mechanism()
        values = dict(fresh.named_parameters()) | dict(fresh.named_buffers())
        for name, x in missing.items():
            x.copy_(values[name])
    for module in mechanism.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]
