"""AdamW, with weight decay only where it makes sense."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

EPS = 1e-8  # the default of PyTorch's AdamW


def create_optimizer(model: nn.Module, config: Any, *, capturable: bool = False) -> AdamW:
    """AdamW over the parameters that need a gradient, in two groups: with weight decay and without.

    ``config``: its ``lr``, ``betas``, ``weight_decay`` and, if it has one, ``eps``.

    It is fused: one kernel updates many parameters. On a GPU it never waits for the device; on a CPU, a small model
    trains 7 % faster with it. Move the model to its device first. ``capturable``: the step can be recorded as a CUDA
    graph, with a tensor as learning rate (:func:`bind_rate`). For a config without ``eps``, it is PyTorch's default.
    """
    decayed, free = split_by_decay(model)
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[name] for name in decayed], "weight_decay": config.weight_decay},
        {"params": [named[name] for name in free], "weight_decay": 0.0},
    ]
    eps = getattr(config, "eps", EPS)
    optimizer = AdamW(groups, lr=config.lr, betas=config.betas, eps=eps, fused=True, capturable=capturable)
    # Else it would warn in every run, as steps are tried before they are recorded.
    optimizer._warned_capturable_if_run_uncaptured = True
    return optimizer


def create_rate(device: torch.device) -> Tensor:
    """A learning rate on the device, for recorded steps, in the type that the fused kernels of the device expect."""
    return torch.zeros((), device=device, dtype=torch.float32 if device.type == "cuda" else torch.float64)


def bind_rate(groups: list[dict[str, Any]], rate: Tensor | None) -> None:
    """Let all groups read the tensor ``rate``, or if None, make their rates plain numbers.

    Needed again after loading a checkpoint, whose groups have their own copies of the rate and of ``capturable``.
    """
    for group in groups:
        group["capturable"] = rate is not None
        group["lr"] = float(group["lr"]) if rate is None else rate


def split_by_decay(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the parameters that weight decay pulls towards zero, and of those it leaves alone.

    The weights of linear maps and convolutions, those inside a mechanism included, may decay to zero. Not decayed are

    - biases and the scales of norms, and anything else with fewer than two axes;
    - what ``model.no_weight_decay()`` names: positions and class tokens, which are a place and not a strength;
    - embeddings, for the same reason, and a head that shares their weight;
    - a mechanism's own parameters. An angle, a power or a scale of 0 is one setting among others, and often a bad one,
      to which decay would drive all heads of a layer. They have two axes only because they are laid out by head and
      channel.

    Example:
        >>> from linattn.models.vision import create_vit
        >>> decayed, free = split_by_decay(create_vit("digits", "pola", depth=1))
        >>> [name for name in decayed if "attn" in name]
        ['blocks.0.attn.qkv.weight', 'blocks.0.attn.proj.weight']
        >>> [name for name in free if "mechanism" in name]
        ['blocks.0.attn.mechanism.power', 'blocks.0.attn.mechanism.scale']
    """
    named_by_model: set[str] = getattr(model, "no_weight_decay", set)()
    linear_maps = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    maps = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, linear_maps)}
    places = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    decayed: list[str] = []
    free: list[str] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        in_mechanism = ".mechanism." in f".{name}"
        spared = name in named_by_model | places or parameter.ndim < 2 or (in_mechanism and name not in maps)
        (free if spared else decayed).append(name)
    return decayed, free
