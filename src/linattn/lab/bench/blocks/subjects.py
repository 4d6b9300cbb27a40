"""A transformer block for each contender, and the pass that is weighed and timed."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor, nn

from linattn.lab.bench.blocks.rows import SOFTMAX, SOFTMAX_MAP
from linattn.lab.bench.blocks.settings import BlocksConfig
from linattn.mechanisms.registry import mechanism_info
from linattn.models.vision.block import Block


@dataclass(frozen=True)
class BlockContender:
    """A mechanism in one of its forms."""

    name: str
    mechanism: str
    impl: str = "auto"

    @property
    def growth(self) -> int:
        """The highest power of the number of tokens that the cost grows with.

        The memory of softmax without its map grows with power 1 if PyTorch has a kernel for it. Otherwise PyTorch makes
        the map, so a prediction must not rely on power 1.
        """
        return 1 if mechanism_info(self.mechanism).cost == "linear" else 2

    def create(self, config: BlocksConfig, impl: str | None = None) -> Block:
        """Build the block in fp32 on the device; all its forms get the same weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            block = Block(config.dim, config.heads, self.mechanism, attention={"impl": impl or self.impl})
        return block.to(config.torch_device)


def make_block_contenders(config: BlocksConfig) -> list[BlockContender]:
    """Softmax as PyTorch computes it, softmax with a materialised map, then the mechanisms asked for."""
    softmax = [BlockContender(SOFTMAX, "softmax"), BlockContender(SOFTMAX_MAP, "softmax", "reference")]
    asked = dict.fromkeys(name for name in config.mechanisms if name != SOFTMAX)
    return softmax + [BlockContender(name, name) for name in asked]


def near_square(tokens: int) -> tuple[int, int]:
    """``(height, width)`` with ``height <= width`` and ``height width = tokens``, as near to a square as possible.

    Example:
        >>> near_square(196), near_square(70000), near_square(7)
        ((14, 14), (250, 280), (1, 7))
    """
    height = next(n for n in range(isqrt(tokens), 0, -1) if tokens % n == 0)
    return height, tokens // height


def draw_tokens(config: BlocksConfig, tokens: int, batch: int) -> Tensor:
    """Draw normal numbers ``(B, T, C)`` in fp32, the same ones on every device."""
    generator = torch.Generator().manual_seed(config.seed)
    return torch.randn(batch, tokens, config.dim, generator=generator).to(config.torch_device)


def precision_of(device: torch.device, autocast: bool) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast)


def training_pass(block: nn.Module, source: Tensor, autocast: bool) -> Callable[[], object]:
    """Forward and backward over a copy of ``source``, with all memory that they need: see ``COUNTED``.

    The copy, the gradient of the output (as a layer above would send it), and the gradients of the input and of every
    parameter are allocated inside the call, so that they count.
    """
    spatial_shape, parameters = near_square(source.shape[1]), list(block.parameters())

    def call() -> object:
        x = source.clone().requires_grad_()
        with precision_of(x.device, autocast):
            output = block(x, spatial_shape)
        return torch.autograd.grad(output, [x, *parameters], torch.ones_like(output), allow_unused=True)

    return call
