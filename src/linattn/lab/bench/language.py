"""The benchmarked language model: blocks of ``linattn.models.language`` around any mechanism, a tied embedding."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.lab.bench.benchmark import SOFTMAX, Benchmark, Type
from linattn.lab.bench.hosts import VARIANTS, Host, variant
from linattn.layers.norms import create_norm
from linattn.layers.rotary import rotations
from linattn.mechanisms.registry import list_mechanisms
from linattn.models.language.block import Block, BlockState, Tokens
from linattn.models.language.options import BlockOptions, norm_behind
from linattn.support.config import option
from linattn.support.options import OptionError

ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class ModelSize:
    """A decoder with a tied embedding; ``kv_heads`` divides ``heads``."""

    depth: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int


# 135 million parameters, and a small size that any machine runs at once.
FULL = ModelSize(depth=30, width=576, heads=9, kv_heads=9, hidden=1280, vocabulary=49152)
TINY = ModelSize(depth=2, width=32, heads=2, kv_heads=2, hidden=48, vocabulary=64)


@dataclass(frozen=True, kw_only=True)
class LanguageBenchmark(Benchmark):
    """Options of benchmarks of the language model."""

    mechanisms: tuple[str, ...] = option(
        ("gated", "mlstm", "retention", "elu"), "Mechanisms, with commas; softmax is measured in any case.",
        choices=lambda: [*list_mechanisms(causal=True), *VARIANTS], affects=False,
    )  # fmt: skip
    dtype: Type = option(
        "", "bfloat16 or float32; in training bfloat16 is autocast around fp32 weights.",
        choices=("", "bfloat16", "float32"), default_text="bfloat16, on a CPU float32",
    )  # fmt: skip
    kv_heads: int = option(0, "Heads of keys and values; 0: as many as of queries, 9.", least=0)
    quick: bool = option(False, "A tiny model: shows that everything runs.")

    def check(self) -> None:
        super().check()
        heads = (TINY if self.quick else FULL).heads
        if self.kv_heads and heads % self.kv_heads:
            raise OptionError("kv_heads", f"must divide the model's {heads} heads, got {self.kv_heads}")

    def filled(self) -> Self:
        return replace(super().filled(), dtype=self.dtype or ("bfloat16" if self.on_gpu else "float32"))

    @property
    def size(self) -> ModelSize:
        base = TINY if self.quick else FULL
        return replace(base, kv_heads=self.kv_heads or base.heads)

    @property
    def subjects(self) -> list[str]:
        """The mechanisms, softmax first."""
        return list(dict.fromkeys((SOFTMAX, *self.mechanisms)))

    def described(self, outcomes: Sequence[Any], rows: Sequence[Any]) -> dict[str, Any]:
        return {"model": asdict(self.size)}

    def overtaken(self, found: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Where mechanisms become faster than softmax, and which forms serve them."""
        said = []
        for own in found:
            at = f"{own['gain']:.3g}x at {own['longest']:,}"
            where = "is not faster than softmax" if own["length"] is None else f"is faster from {own['length']:,.0f} on"
            said.append(f"{own['mechanism']}, {own['setting']}: {where} ({at})")
        forms = (f"{row['mechanism']}: {'; '.join(row['explain'])}" for row in rows if row.get("explain"))
        return [*said, *dict.fromkeys(forms)]


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
