"""One stage of a backbone, a step down in resolution followed by blocks, and the attention of each stage."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from linattn.layers.attention_options import check_mechanism_options
from linattn.layers.rotary import makes_pairs, turned_channels
from linattn.mechanisms.registry import create_mechanism, mechanism_info


class StageAttention(NamedTuple):
    """A stage's mechanism and the options that belong to it: ``mechanism_options`` and ``impl`` of ``Attention``."""

    mechanism: str
    options: dict[str, Any]


def stage_attentions(
    mechanism: str | Sequence[str],
    pattern: str,
    *,
    mechanism_options: Mapping[str, Mapping[str, Any]] | None = None,
    impl: str = "auto",
) -> list[StageAttention]:
    """Choose the attention of every stage that has one.

    Args:
        mechanism: one name, for the stages that ``pattern`` marks with an l (those with an s have softmax), or a name
            for each stage, in which case the pattern is not used.
        pattern: a letter per stage, l or s.
        mechanism_options: options of mechanisms, by their names.
        impl: form of the algebra, in the stages whose mechanism has it; the others keep ``"auto"``.

    Example:
        >>> from linattn.models.vision.stage import stage_attentions
        >>> [stage.mechanism for stage in stage_attentions("relu", "llss")]
        ['relu', 'relu', 'softmax', 'softmax']
    """
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("ls"):
        raise ValueError(f"stages must be letters l (linear) and s (softmax), one per stage, got {pattern!r}")
    if isinstance(mechanism, str):
        names = [mechanism if letter == "l" else "softmax" for letter in pattern]
    else:
        names = list(mechanism)
        if len(names) != len(pattern):
            raise ValueError(f"mechanism must be one name or {len(pattern)}, one per stage, got {len(names)}: {names}")
    infos, options, listed = [mechanism_info(name) for name in names], mechanism_options or {}, dict.fromkeys(names)
    for name in options:
        if name not in names:
            raise ValueError(f"mechanism_options has {name!r}, but the stages have {', '.join(listed)}")
    if not any(impl in info.cls.impls for info in infos):
        raise ValueError(f"impl={impl!r} is no form of {', '.join(listed)}")
    return [
        StageAttention(info.name, {"mechanism_options": dict(options.get(info.name, {})), "impl": form})
        for info, form in ((info, impl if impl in info.cls.impls else "auto") for info in infos)
    ]


def fitting_parts(
    parts: Mapping[str, Any], own: StageAttention, dim: int, num_heads: int, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Options of an attention: ``parts``, then what the caller has ``given``, then the stage's own.

    Rotary positions among the parts are left out if the mechanism's features do not form pairs.
    """
    divides = isinstance(num_heads, int) and num_heads >= 1 and dim % num_heads == 0  # else the layer raises the error
    if parts.get("rotary") is not None and divides and not _rotates(parts["rotary"], own, dim // num_heads):
        parts = {name: value for name, value in parts.items() if name != "rotary"}
    return dict(parts) | dict(given or {}) | own.options


def _rotates(rotary: str, own: StageAttention, head_dim: int) -> bool:
    if mechanism_info(own.mechanism).cls.rotates is None:
        return False
    named = own.options["mechanism_options"]
    check_mechanism_options(named)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # built only to read its properties
        mechanism = create_mechanism(own.mechanism, num_heads=1, head_dim=head_dim, **named)
    return makes_pairs(*turned_channels(rotary, mechanism))


def check_stages(num_stages: int, **values: Sequence[Any]) -> None:
    """Raise unless every option has one value per stage."""
    for name, value in values.items():
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != num_stages:
            raise ValueError(f"{name} must have {num_stages} values, one per stage, got {value!r}")


def stage_rates(rate: float, depths: Sequence[int]) -> list[list[float]]:
    """Rates of skipped branches per stage and block, rising linearly from 0 at the first block to ``rate``."""
    blocks = iter(torch.linspace(0, rate, sum(depths), dtype=torch.float64, device="cpu").tolist())
    return [[next(blocks) for _ in range(depth)] for depth in depths]


class Stage(nn.Module):
    """``(B, C, H, W)`` to ``(B, C', H', W')``: ``downsample``, then blocks on the plane's tokens, row by row."""

    def __init__(self, downsample: nn.Module, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.grad_checkpointing = False
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        spatial_shape = (x.shape[2], x.shape[3])
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = run_block(block, x, spatial_shape, checkpointing=self.grad_checkpointing)
        return x.transpose(1, 2).unflatten(2, spatial_shape)


class PlaneStage(nn.Module):
    """``(B, C, H, W)`` to ``(B, C', H', W')``: blocks on the plane itself, the first of which steps down."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.grad_checkpointing = False
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = run_block(block, x, checkpointing=self.grad_checkpointing)
        return x


def run_block(block: nn.Module, *inputs: Any, checkpointing: bool) -> Tensor:
    """Run a block; with ``checkpointing`` only its input is kept, and backward recomputes the rest."""
    if not (checkpointing and torch.is_grad_enabled()):
        return block(*inputs)
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    if not norms or torch.compiler.is_compiling():
        return checkpoint(block, *inputs, use_reentrant=False)
    contexts = lambda: (nullcontext(), _frozen_statistics(norms))  # noqa: E731
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts)


@contextmanager
def _frozen_statistics(norms: list[_BatchNorm]) -> Iterator[None]:
    """Keep running statistics unchanged, so that a batch that runs twice counts once."""
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, _, count in before:
        norm.momentum = 0.0
        norm.num_batches_tracked = None if count is None else count.clone()
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum, norm.num_batches_tracked = momentum, count
