"""What a config computes with: the Accelerator, which knows devices and processes, and the optimiser."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from linattn.support.extras import need

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


@contextmanager
def matrix_products(precision: str) -> Iterator[None]:
    """With bf16, let matrix products that stay in fp32 round their factors to TF32, which tensor cores need.

    The factors are mostly bf16 numbers, which TF32 holds exactly, and the sums stay fp32.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "bf16" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def create_accelerator(config: Any) -> "Accelerator":
    """An Accelerator for the device and precision of a config; a GPU if there is one and the config names none.

    With ``accelerate launch`` or ``torchrun`` it is that of one of several processes.
    """
    need("training", "accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]

    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        # accelerate keeps its first device and precision for the whole process and refuses others, but a process that
        # trains several models may need others.
        AcceleratorState._reset_state(reset_partial_state=True)
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
    mixed = "bf16" if config.precision == "bf16" else "no"
    return Accelerator(mixed_precision=mixed, cpu=device.type == "cpu")


def create_optimizer(model: nn.Module, config: Any, *, capturable: bool = False) -> torch.optim.AdamW:
    """AdamW over the parameters that need a gradient, in two groups: with weight decay and without.

    It is fused: one kernel updates many parameters. On a GPU it never waits for the device; on a CPU, a small model
    trains 7 % faster with it. Move the model to its device first. ``capturable``: the step can be recorded as a CUDA
    graph, with a tensor as learning rate.
    """
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[name] for name in names], "weight_decay": decay}
        for names, decay in zip(split_by_decay(model), (config.weight_decay, 0.0), strict=True)
    ]
    eps = getattr(config, "eps", 1e-8)  # else PyTorch's
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=eps, fused=True, capturable=capturable)
    # Else it would warn in every run, as steps are tried before they are recorded.
    optimizer._warned_capturable_if_run_uncaptured = True
    return optimizer


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
    spared: set[str] = set(getattr(model, "no_weight_decay", set)())
    maps: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            maps.add(f"{name}.weight")
        elif isinstance(module, nn.Embedding):
            spared.add(f"{name}.weight")
    decayed: list[str] = []
    free: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own = ".mechanism." in f".{name}" and name not in maps
            (free if own or name in spared or parameter.ndim < 2 else decayed).append(name)
    return decayed, free
