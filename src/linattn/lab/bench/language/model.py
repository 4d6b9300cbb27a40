"""The benchmarked language model: blocks of ``linattn.models.language`` around any mechanism, a tied embedding."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.lab.bench.language.sizes import ModelSize
from linattn.lab.bench.models.cases import SOFTMAX, variant
from linattn.lab.bench.models.hosts import Host
from linattn.layers.norms import create_norm
from linattn.layers.rotary import rotations
from linattn.models.language.block import Block, BlockState, Tokens
from linattn.models.language.options import BlockOptions, norm_behind

ROTARY_BASE = 10000.0


class TextModel(Host):
    """Tokens ``(B, T)`` to hidden states ``(B, T, C)`` to logits; ``forward(inputs, targets)`` is the loss.

    Every mechanism gets the same model, rotary positions included. Without a normaliser the output of a decay grows
    with what it remembers, so mechanisms without a norm of their own get one by head after them, as in their papers.
    """

    def __init__(self, size: ModelSize, mechanism: str, impl: str = "auto", depth: int | None = None) -> None:
        super().__init__()
        name, own = variant(mechanism)
        options = BlockOptions(
            dim=size.width, num_heads=size.heads, num_kv_heads=size.kv_heads, mlp_dim=size.hidden, mechanism=name,
            mechanism_options=own, impl="auto" if name == SOFTMAX else impl,
            attention_norm=norm_behind([(name, own)]),
        )  # fmt: skip
        self.rotary_width = options.rotary_width
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(depth or size.depth))
        self.norm = create_norm("rms", size.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1 and ".mechanism." not in name:
                nn.init.normal_(parameter, std=0.02)

    def stem(self, inputs: Tensor) -> Tensor:
        return self.embedding(inputs)

    def head(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x).flatten(0, 1).float(), targets.flatten())

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.head(self.hidden(inputs), targets)

    def hidden(self, inputs: Tensor) -> Tensor:
        """Hidden states ``(B, T, C)`` before the last norm, all tokens at once."""
        x = self.stem(inputs)
        tokens = self.tokens_at(torch.arange(inputs.shape[1], device=x.device).unsqueeze(0), x)
        for block in self.blocks:
            x = block(x, tokens)
        return x

    def extend(
        self, inputs: Tensor, states: Sequence[BlockState | None], positions: Tensor
    ) -> tuple[Tensor, list[BlockState]]:
        """As :meth:`hidden`, but after ``states``: ``inputs (B, T)`` at ``positions (1, T)``; also the next states."""
        x, new = self.stem(inputs), list[BlockState]()
        tokens = self.tokens_at(positions, x)
        for block, state in zip(self.blocks, states, strict=True):
            assert isinstance(block, Block)
            x, own = block.with_state(x, tokens, state)
            new.append(own)
        return x, new

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embedding.weight)

    def tokens_at(self, positions: Tensor, like: Tensor) -> Tokens:
        return Tokens(rotations=rotations(positions, [self.rotary_width], ROTARY_BASE, like))


def create_model(
    size: ModelSize, mechanism: str, device: torch.device, seed: int, *, impl: str = "auto", depth: int | None = None
) -> TextModel:
    """Build the model in fp32; all forms of a mechanism get the same weights, drawn on the model's device."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        return TextModel(size, mechanism, impl, depth)


def draw_text(size: ModelSize, shape: tuple[int, ...], device: torch.device, seed: int) -> Tensor:
    """Draw tokens on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(size.vocabulary, shape, generator=generator, device=device)
