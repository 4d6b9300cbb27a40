"""Hosts: language models around any mechanisms, sized for a task."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from linattn.lab.tasks.text import SequenceTask
from linattn.lab.train.mechanism_options import layer_options
from linattn.lab.train.text.pattern import layer_names
from linattn.lab.train.text.sizes import SIZES
from linattn.models.language.options import norm_behind
from linattn.support.options import OptionError, check_option

AUTOMATIC = "auto"


@dataclass(frozen=True)
class HostOptions:
    """The host of a run: a language model. Fields of None are as in ``size``, or off if sizes do not set them."""

    size: str = "pico"
    mechanism: str = "softmax"
    """The name of a mechanism, or a pattern of several, such as ``gated*3,softmax``."""
    canon: str | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of mechanisms, by name; options under the empty name are for all mechanisms."""
    width: int | None = None
    depth: int | None = None
    heads: int | None = None
    mlp_width: int | None = None
    rotary: float | None = None
    attention_norm: str | None = AUTOMATIC
    """Norm after the mechanism; ``auto``: ``head_rms``, or None if no layer needs it, as with softmax or ZeroS."""
    attention_gate: str | None = None
    """Activation of an output gate after that norm, computed from the input, as in RetNet, GLA and mLSTM."""
    dropout: float = 0.0
    head_dim: int | None = None
    """Channels of a head, which fix the number of heads for every width; to be given in place of ``heads``."""
    tied: bool | None = None
    """Whether embeddings and head share one matrix."""

    def check(self) -> None:
        """Raise ``OptionError`` for options that are wrong for every task."""
        check_option("size", self.size, SIZES)
        for name in ("width", "depth", "heads", "mlp_width", "head_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(name, f"must be an integer >= 1, got {value}")
        if self.heads is not None and self.head_dim is not None:
            raise OptionError("head_dim", f"and heads = {self.heads} both fix the number of heads: give one of them")
        width = self.shape["hidden_size"]
        if self.head_dim is not None and width % self.head_dim:
            allowed = f"a multiple of {self.head_dim}, the channels of a head, where heads is not given"
            raise OptionError("width", f"must be {allowed}, got {width}")
        layer_options(self.names, self.options)

    @property
    def shape(self) -> dict[str, Any]:
        """The fields of ``LinearAttentionConfig`` for width, depth and heads, and others that a size sets."""
        found = SIZES[self.size]()
        if self.width is not None:
            scaled = found.get("intermediate_size")
            if scaled is not None:
                found["intermediate_size"] = max(1, scaled * self.width // found["hidden_size"])
            found["hidden_size"] = self.width
        heads = self.heads if self.head_dim is None else found["hidden_size"] // self.head_dim
        changed = {"num_hidden_layers": self.depth, "num_attention_heads": heads, "intermediate_size": self.mlp_width,
                   "rotary": self.rotary, "tie_word_embeddings": self.tied}  # fmt: skip
        if heads is not None:
            found.pop("num_key_value_heads", None)
        return found | {name: value for name, value in changed.items() if value is not None}

    @property
    def names(self) -> list[str]:
        """The mechanism of each layer."""
        return layer_names(self.mechanism, self.shape["num_hidden_layers"], self.mechanism_option)

    @property
    def mechanism_option(self) -> str:
        """The command line option for ``mechanism``: ``hybrid`` for a pattern of several, else ``mechanism``."""
        return "hybrid" if any(mark in self.mechanism for mark in ",/*") else "mechanism"

    @property
    def norm(self) -> str | None:
        if self.attention_norm != AUTOMATIC:
            return self.attention_norm
        return norm_behind(zip(self.names, layer_options(self.names, self.options), strict=True))


def create_host(host: HostOptions, task: SequenceTask, seed: int) -> Any:
    """Create a model of ``linattn.models.language`` with the head that ``task`` needs, in fp32 on the CPU.

    Weights outside of mechanisms start the same for every mechanism, even if a mechanism draws random numbers itself.

    Example:
        >>> from linattn.lab.tasks.text import text_task
        >>> model = create_host(HostOptions("mqar", "elu", width=32), text_task("mqar", vocab=64), seed=0)
        >>> type(model).__name__, model.config.hidden_size
        ('LinearAttentionForCausalLM', 32)
    """
    from linattn.models import language

    host.check()
    causal = task.kind == "causal"
    options: dict[str, Any] = host.shape | {
        "vocab_size": task.vocabulary, "causal": causal, "mechanism": host.names, "canon": host.canon or None,
        "mechanism_options": layer_options(host.names, host.options), "attention_norm": host.norm,
        "attention_gate": host.attention_gate, "dropout": host.dropout,
    }  # fmt: skip
    if options.pop("learned_positions", False):
        options["max_position_embeddings"] = task.length
    end = getattr(getattr(task, "encoder", None), "end", None)
    if causal and end is not None and end < task.vocabulary:
        options["eos_token_id"] = end  # the token between documents, at which `generate` stops
    if task.kind == "classification":
        options |= {"num_labels": task.classes, "pooling": task.pooling}
    kinds = {"causal": "CausalLM", "masked": "MaskedLM", "classification": "SequenceClassification"}
    head = getattr(language, f"LinearAttentionFor{kinds[task.kind]}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = head(language.LinearAttentionConfig(**options))
        except (ValueError, TypeError, KeyError) as error:
            raise _named(error, host) from error
        torch.manual_seed(seed)
        _start_alike(model)
    return model


def count_parameters(model: nn.Module) -> int:
    """The number of parameters, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def with_parameters(host: HostOptions, task: SequenceTask, wanted: int, multiple: int = 8) -> HostOptions:
    """The same host with the width of its feed-forward parts chosen so that it has about ``wanted`` parameters.

    Mechanisms with parameters of their own should not win merely by having more. The width is a multiple of
    ``multiple``, and the remaining difference is less than one such step.
    """
    model = create_host(host, task, 0)
    width = model.config.intermediate_size
    more = create_host(replace(host, mlp_width=width + multiple), task, 0)
    here = count_parameters(model)
    step = count_parameters(more) - here
    found = width + multiple * round((wanted - here) / step)
    if found < multiple:
        raise OptionError(
            "mechanism", f"{host.mechanism} has more parameters without a feed-forward part than {wanted:,}"
        )
    return replace(host, mlp_width=found)


@torch.no_grad()
def _start_alike(model: Any) -> None:
    """Draw the host's own weights again, in an order that does not depend on the mechanisms."""
    deviation = model.config.initializer_range
    for name, module in model.named_modules():
        if ".mechanism" in name:
            continue
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(0.0, deviation)
        elif "canon" in name.rpartition(".")[2]:
            module.reset_parameters()


def _named(error: Exception, host: HostOptions) -> OptionError:
    """Turn an error about an argument of the model into one about the option of the command line."""
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    options = {"canon": "canon", "rotary": "rotary", "dropout": "dropout", "attention_norm": "attention_norm",
               "attention_gate": "attention_gate", "num_attention_heads": "heads", "hidden_size": "width",
               "mechanism": host.mechanism_option}  # fmt: skip
    first = message.split("=")[0].split()[0] if message else ""
    if "has no option" in message:
        return OptionError("option", message)
    if first == "num_attention_heads" and host.heads is None and host.width is not None:
        return OptionError("width", message)
    if first in options:
        return OptionError(options[first], message)
    return OptionError(
        "option" if host.options else host.mechanism_option, f"{host.mechanism} does not fit this host: {message}"
    )
