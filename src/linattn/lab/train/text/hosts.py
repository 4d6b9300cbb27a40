"""Hosts: language models around any mechanisms, sized for a task."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linattn.lab.tasks.text import SequenceTask
from linattn.lab.train.config import check_owners, options_of
from linattn.models.language.options import ATTENTION_GATES, ATTENTION_NORMS, norm_behind
from linattn.support.config import Config, option
from linattn.support.options import OptionError

AUTOMATIC = "auto"
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
             "intermediate_size": 1536, "tie_word_embeddings": True}
}  # fmt: skip
_of_model = partial(option, group="Model")
_by_size = partial(_of_model, None, default_text="by --size")
_rare = partial(_of_model, rare=True)
_of_norm = partial(_rare, choices=(AUTOMATIC, "none", *filter(None, ATTENTION_NORMS)))
_of_gate = partial(_rare, choices=("none", *filter(None, ATTENTION_GATES)), default_text="none")


@dataclass(frozen=True, kw_only=True)
class HostShape(Config):
    """What hosts have in common that are compared. Fields of None are as in ``size``, or off where it does not say."""

    size: str = _of_model("pico", "Size of the model.", choices=SIZES, default_text="by task")
    depth: int | None = _by_size("Blocks of the model.", least=1)
    heads: int | None = _by_size("Attention heads of a block.", least=1, rare=True)
    mlp_width: int | None = _by_size("Channels inside the feed-forward parts.", least=1, rare=True)
    rotary: float | None = _by_size("Share of channels that rotary positions turn.", least=0, most=1, rare=True)
    attention_norm: str | None = _of_norm(
        AUTOMATIC, "Norm of the attention's output; auto: head_rms, or none where no layer needs it, as with softmax."
    )
    attention_gate: str | None = _of_gate(
        None, "Gate of the attention's output, behind its norm, computed from the input, as in RetNet, GLA and mLSTM."
    )
    dropout: float = _rare(
        0.0, "Dropout on embeddings and both branches of a block.", least=0, below=1, default_text="0, or by --recipe"
    )
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

    mechanism: str = _of_model("softmax", "Mechanism of every layer, a name from `linattn mechanisms`.")
    hybrid: str = _of_model(
        "", "Mechanisms layer by layer, repeated to the last layer, such as gated*3,softmax; in place of --mechanism."
    )
    canon: str | None = _of_model(
        None, "Positions of Canon layers: ABCD, AbCD, some of these letters, or none.", default_text="none"
    )
    width: int | None = _by_size("Channels of the model.", least=1)
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
        check_owners(self.option, self.layers)
        if len(set(self.layers)) > 1 and not all("." in key for key in self.option):
            raise OptionError("option", "with several mechanisms, say whose it is: mechanism.key=value")

    @property
    def shape(self) -> dict[str, Any]:
        """The fields of ``LinearAttentionConfig`` for width, depth and heads, and others that a size sets."""
        found = dict(SIZES[self.size])
        if self.width is not None:
            if "intermediate_size" in found:
                found["intermediate_size"] = max(1, found["intermediate_size"] * self.width // found["hidden_size"])
            found["hidden_size"] = self.width
        heads = self.heads if self.head_dim is None else found["hidden_size"] // self.head_dim
        if heads is not None:
            found.pop("num_key_value_heads", None)
        changed = {"num_hidden_layers": self.depth, "num_attention_heads": heads, "intermediate_size": self.mlp_width,
                   "rotary": self.rotary, "tie_word_embeddings": self.tied}  # fmt: skip
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
            names += [name] * int(times or 1)
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
    """
    from linattn.models import language

    causal = task.kind == "causal"
    options: dict[str, Any] = host.shape | {
        "vocab_size": task.vocabulary, "causal": causal, "mechanism": host.layers, "canon": host.canon,
        "mechanism_options": host.options, "attention_norm": host.norm,
        "attention_gate": host.attention_gate, "dropout": host.dropout
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
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        try:
            model = head(language.LinearAttentionConfig(**options))
        except (ValueError, TypeError, KeyError) as error:
            raise _named(error, host) from error
        torch.manual_seed(seed)
        # Draw the host's own weights again, in an order that does not depend on the mechanisms.
        for name, module in model.named_modules():
            if ".mechanism" in name:
                continue
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(0.0, model.config.initializer_range)
            elif "canon" in name.rpartition(".")[2]:
                module.reset_parameters()
    return model


def _named(error: Exception, host: Host) -> OptionError:
    """Turn an error about an argument of the model into one about the option of the command line."""
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    heads = "heads" if host.heads is not None or host.width is None else "width"
    options = {"num_attention_heads": heads, "hidden_size": "width", "mechanism": host.named_by}
    first = message.split("=")[0].partition(" ")[0]
    if "has no option" in message:
        return OptionError("option", message)
    if first in options or hasattr(host, first):
        return OptionError(options.get(first, first), message)
    return OptionError("option" if host.option else host.named_by, f"{host.pattern} does not fit this host: {message}")


def count_parameters(model: nn.Module) -> int:
    """The number of parameters, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def with_parameters(host: Host, task: SequenceTask, wanted: int, multiple: int = 8) -> Host:
    """The same host with the width of its feed-forward parts chosen so that it has about ``wanted`` parameters.

    Mechanisms with parameters of their own should not win merely by having more. The width is a multiple of
    ``multiple``, and the remaining difference is less than one such step.
    """
    model = create_host(host, task, 0)
    width, here = model.config.intermediate_size, count_parameters(model)
    step = count_parameters(create_host(replace(host, mlp_width=width + multiple), task, 0)) - here
    found = width + multiple * round((wanted - here) / step)
    if found < multiple:
        words = f"{host.pattern} has more parameters without a feed-forward part than {wanted:,}"
        raise OptionError("mechanism", words)
    return replace(host, mlp_width=found)


def take_weights(model: Any, folder: Path) -> None:
    """Copy the parameters of ``model`` that ``folder`` has; a new head stays as it is.

    A folder whose body does not fit entirely is refused.
    """
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    if not path.is_file():
        raise OptionError("start", f"must be the folder of a trained model with {WEIGHTS}, got {folder}")
    found, own = load_file(path), model.state_dict()
    same = {name for name in found.keys() & own.keys() if found[name].shape == own[name].shape}
    wrong = sorted(name for name in (found.keys() | own.keys()) - same if name.startswith("model."))
    if wrong:
        raise OptionError("start", f"{folder} holds another model: {', '.join(wrong[:3])} does not fit")
    model.load_state_dict({name: found[name] for name in same}, strict=False)
