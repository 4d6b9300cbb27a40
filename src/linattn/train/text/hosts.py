"""A language model around any mechanisms, sized for a task."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from linattn.models.language.output_norm import norm_behind
from linattn.support.options import OptionError, check_option
from linattn.tasks.text import SequenceTask
from linattn.train.mechanism_options import layer_options
from linattn.train.text.pattern import layer_names
from linattn.train.text.sizes import SIZES

AUTOMATIC = "auto"


@dataclass(frozen=True)
class HostOptions:
    """The host of a run. None: as ``size`` has it."""

    size: str = "pico"
    mechanism: str = "softmax"
    """A name, or a pattern of several such as ``gated*3,softmax``."""
    canon: str | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of mechanisms, by name; of all of them under the empty one."""
    width: int | None = None
    depth: int | None = None
    heads: int | None = None
    mlp_width: int | None = None
    rotary: float | None = None
    attention_norm: str | None = AUTOMATIC
    """Behind the mechanism; ``auto``: by head, except where all layers are softmax or ZeroS, which have their own."""
    attention_gate: str | None = None
    """The activation of a gate behind that norm, made of the input, as RetNet, GLA and mLSTM have one."""
    dropout: float = 0.0
    head_dim: int | None = None
    """Channels of a head, which fix the number of heads at every width; in the place of ``heads``."""
    tied: bool | None = None
    """One matrix for embeddings and head."""

    def check(self) -> None:
        """Raise ``OptionError`` for what is wrong whatever the task."""
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
        """What ``LinearAttentionConfig`` is told about widths and depths."""
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
        """The option that ``mechanism`` was given by: a pattern of several stands in another one."""
        return "hybrid" if any(mark in self.mechanism for mark in ",/*") else "mechanism"

    @property
    def norm(self) -> str | None:
        if self.attention_norm != AUTOMATIC:
            return self.attention_norm
        return norm_behind(zip(self.names, layer_options(self.names, self.options), strict=True))


def create_host(host: HostOptions, task: SequenceTask, seed: int) -> Any:
    """A model of ``linattn.models.language`` with the head that ``task`` needs, in fp32 on the CPU.

    All that mechanisms do not own starts the same beside each of them, also beside one that draws numbers for itself.

    Example:
        >>> from linattn.tasks.text import text_task
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
        options["eos_token_id"] = end  # what stands between documents: `generate` stops there
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
    """Each once, tied ones too."""
    return sum(parameter.numel() for parameter in model.parameters())


def with_parameters(host: HostOptions, task: SequenceTask, wanted: int, multiple: int = 8) -> HostOptions:
    """The same host with the width of its feed-forward parts chosen so that it has about ``wanted`` parameters.

    A mechanism that brings parameters of its own is not to win by having more of them. The width is a multiple of
    ``multiple``; what remains is less than one such step.
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
    """Draw again what the host owns, in an order that no mechanism can shift."""
    deviation = model.config.initializer_range
    for name, module in model.named_modules():
        if ".mechanism" in name:
            continue
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(0.0, deviation)
        elif "canon" in name.rpartition(".")[2]:
            module.reset_parameters()


def _named(error: Exception, host: HostOptions) -> OptionError:
    """A model names its argument; on the command line it is an option."""
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
