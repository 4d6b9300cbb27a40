"""Hosts: language models around any mechanisms, sized for a task."""

from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linattn.lab.tasks.text import SequenceTask
from linattn.lab.train.mechanism_options import options_of
from linattn.models.language.options import ATTENTION_GATES, ATTENTION_NORMS, norm_behind
from linattn.support.config import Config, option
from linattn.support.options import OptionError

AUTOMATIC = "auto"
BY_SIZE = "by --size"
WEIGHTS = "model.safetensors"
# Sizes of hosts: fields of LinearAttentionConfig. learned_positions: max_position_embeddings is the task's length.
SIZES: dict[str, dict[str, Any]] = {
    # For tests: it learns a small task in seconds on one core.
    "pico": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    # For associative recall, after Zoology: two layers of one head, so that the width alone decides the state. Zoology
    # has no feed-forward part; a block of this size has one, as narrow as the model.
    "mqar": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 64},
    # For the Long Range Arena, as in the PyTorch setting of papers on linear attention. Positions are learned vectors:
    # rotary positions tell how far tokens are apart, but not which is the first, which in a nested list decides most.
    "lra": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
            "mlp": "gelu", "rotary": 0.0, "learned_positions": True},
    # For the MAD suite: two pairs of a mixer and a SwiGLU, 128 channels, without positions.
    "mad": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8, "rotary": 0.0},
    # For bytes of text: 14 M parameters in 8 layers.
    "small": {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6},
    # 12 layers of 768 channels: 85 M parameters without embeddings, as the smallest GPT-2 and BERT.
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    # 135 M parameters with 49,152 tokens, in the shape of SmolLM2: deep and narrow, three heads to each of k and v.
    "135m": {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
             "intermediate_size": 1536, "tie_word_embeddings": True},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HostShape(Config):
    """What hosts have in common that are compared. Fields of None are as in ``size``, or off where it does not say."""

    size: str = option("pico", "Size of the model.", choices=SIZES, group="Model", default_text="by task")
    depth: int | None = option(None, "Blocks of the model.", least=1, group="Model", default_text=BY_SIZE)
    heads: int | None = option(
        None, "Attention heads of a block.", least=1, group="Model", rare=True, default_text=BY_SIZE
    )
    mlp_width: int | None = option(
        None, "Channels inside the feed-forward parts.", least=1, group="Model", rare=True, default_text=BY_SIZE
    )
    rotary: float | None = option(
        None, "Share of a head's channels that rotary positions turn.", least=0, most=1, group="Model", rare=True,
        default_text=BY_SIZE,
    )  # fmt: skip
    attention_norm: str | None = option(
        AUTOMATIC, "Norm of the attention's output; auto: head_rms, or none where no layer needs it, as with softmax.",
        choices=(AUTOMATIC, "none", *filter(None, ATTENTION_NORMS)), group="Model", rare=True,
    )  # fmt: skip
    attention_gate: str | None = option(
        None, "Gate of the attention's output, behind its norm, computed from the input, as in RetNet, GLA and mLSTM.",
        choices=("none", *filter(None, ATTENTION_GATES)), group="Model", rare=True, default_text="none",
    )  # fmt: skip
    dropout: float = option(
        0.0, "Dropout on embeddings and on both branches of a block.", least=0, below=1, group="Model", rare=True,
        default_text="0, or that of --recipe",
    )  # fmt: skip
    head_dim: int | None = option(
        None, "Channels of a head, which fix the number of heads; in place of heads.", least=1, hidden=True
    )
    tied: bool | None = option(None, "Whether embeddings and head share one matrix.", hidden=True)


@dataclass(frozen=True, kw_only=True)
class Host(HostShape):
    """The host of one run: a language model.

    Example:
        >>> Host(hybrid="gated*3,softmax", depth=6).layers
        ['gated', 'gated', 'gated', 'softmax', 'gated', 'gated']
    """

    mechanism: str = option("softmax", "Mechanism of every layer, a name from `linattn mechanisms`.", group="Model")
    hybrid: str = option(
        "", "Mechanisms layer by layer, repeated to the last layer, such as gated*3,softmax; in place of --mechanism.",
        group="Model",
    )  # fmt: skip
    canon: str | None = option(
        None, "Positions of Canon layers: ABCD, AbCD, some of these letters, or none.", group="Model",
        default_text="none",
    )  # fmt: skip
    width: int | None = option(None, "Channels of the model.", least=1, group="Model", default_text=BY_SIZE)
    option: dict[str, Any] = option(
        {}, "Option of a mechanism: key=value for all, mechanism.key=value for one; may be given again.", group="Model"
    )

    def check(self) -> None:
        super().check()
        if self.heads is not None and self.head_dim is not None:
            raise OptionError("head_dim", f"and heads = {self.heads} both fix the number of heads: give one of them")
        width = self.shape["hidden_size"]
        if self.head_dim is not None and width % self.head_dim:
            allowed = f"a multiple of {self.head_dim}, the channels of a head, where heads is not given"
            raise OptionError("width", f"must be {allowed}, got {width}")
        names = dict.fromkeys(self.layers)
        for key in self.option:
            owner = key.rpartition(".")[0]
            if owner and owner not in names:
                raise OptionError("option", f"{key} is given, but the layers are {', '.join(names)}")
            if not owner and len(names) > 1:
                raise OptionError("option", "with several mechanisms, say whose it is: mechanism.key=value")

    @property
    def shape(self) -> dict[str, Any]:
        """The fields of ``LinearAttentionConfig`` for width, depth and heads, and others that a size sets."""
        found = dict(SIZES[self.size])
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
    def layers(self) -> list[str]:
        """The mechanism of each layer: the names of the pattern, repeated."""
        names: list[str] = []
        depth = self.shape["num_hidden_layers"]
        for part in self.pattern.replace("/", ",").split(","):
            name, star, times = (text.strip() for text in part.partition("*"))
            if not name or (star and not (times.isdecimal() and int(times))):
                raise OptionError(self.named_by, f"must look like gated*3,softmax, got {self.pattern!r}")
            names += [name] * (int(times) if star else 1)
        if len(names) > depth:
            raise OptionError(
                self.named_by, f"names {len(names)} layers, but the model has {depth}, got {self.pattern!r}"
            )
        return list(islice(cycle(names), depth))

    @property
    def pattern(self) -> str:
        return self.hybrid or self.mechanism

    @property
    def named_by(self) -> str:
        """The option that names the mechanisms."""
        return "hybrid" if any(mark in self.pattern for mark in ",/*") else "mechanism"

    @property
    def options(self) -> list[dict[str, Any]]:
        """The options of each layer's mechanism."""
        return [options_of(name, self.option) for name in self.layers]

    @property
    def norm(self) -> str | None:
        if self.attention_norm != AUTOMATIC:
            return self.attention_norm
        return norm_behind(zip(self.layers, self.options, strict=True))


def create_host(host: Host, task: SequenceTask, seed: int) -> Any:
    """Create a model of ``linattn.models.language`` with the head that ``task`` needs, in fp32 on the CPU.

    Weights outside of mechanisms start the same for every mechanism, even if a mechanism draws random numbers itself.

    Example:
        >>> from linattn.lab.tasks.text import text_task
        >>> model = create_host(Host(size="mqar", mechanism="elu", width=32), text_task("mqar", vocab=64), seed=0)
        >>> type(model).__name__, model.config.hidden_size
        ('LinearAttentionForCausalLM', 32)
    """
    from linattn.models import language

    causal = task.kind == "causal"
    options: dict[str, Any] = host.shape | {
        "vocab_size": task.vocabulary, "causal": causal, "mechanism": host.layers, "canon": host.canon,
        "mechanism_options": host.options, "attention_norm": host.norm,
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


def with_parameters(host: Host, task: SequenceTask, wanted: int, multiple: int = 8) -> Host:
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
            "mechanism", f"{host.pattern} has more parameters without a feed-forward part than {wanted:,}"
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


def _named(error: Exception, host: Host) -> OptionError:
    """Turn an error about an argument of the model into one about the option of the command line."""
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    options = {"canon": "canon", "rotary": "rotary", "dropout": "dropout", "attention_norm": "attention_norm",
               "attention_gate": "attention_gate", "num_attention_heads": "heads", "hidden_size": "width",
               "mechanism": host.named_by}  # fmt: skip
    first = message.split("=")[0].split()[0] if message else ""
    if "has no option" in message:
        return OptionError("option", message)
    if first == "num_attention_heads" and host.heads is None and host.width is not None:
        return OptionError("width", message)
    if first in options:
        return OptionError(options[first], message)
    return OptionError("option" if host.option else host.named_by, f"{host.pattern} does not fit this host: {message}")


def take_weights(model: Any, folder: Path) -> list[str]:
    """Copy the parameters of ``model`` that ``folder`` has; return the names of the others, a new head.

    A folder whose body does not fit entirely is refused.
    """
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    if not path.is_file():
        raise OptionError("start", f"must be the folder of a trained model with {WEIGHTS}, got {folder}")
    found, own = load_file(path), model.state_dict()
    body = {name: value for name, value in found.items() if name.startswith("model.")}
    wrong = [name for name in own if name.startswith("model.") and name not in body]
    wrong += [name for name, value in body.items() if name not in own or own[name].shape != value.shape]
    if wrong:
        raise OptionError("start", f"{folder} holds another model: {', '.join(sorted(set(wrong))[:3])} does not fit")
    same = {name: value for name, value in found.items() if name in own and own[name].shape == value.shape}
    model.load_state_dict(same, strict=False)
    return [name for name in own if name not in same]
