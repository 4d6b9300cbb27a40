"""Models in three parts, stem, blocks and head with the loss, so that each can be compiled by itself."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.lab.bench.models.cases import SOFTMAX, ModelCase, variant
from linattn.layers.attention import Attention
from linattn.layers.norms import RMSNorm
from linattn.models.vision import create_vit
from linattn.models.vision.catalog import TIMM_MODELS
from linattn.support.compiling import compile_blocks


class Host(nn.Module, ABC):
    """``forward(inputs, targets)`` returns the loss; each of ``blocks`` maps tokens ``(B, T, C)`` to tokens."""

    blocks: nn.ModuleList

    @abstractmethod
    def stem(self, inputs: Tensor) -> Tensor:
        """Map the inputs to tokens ``(B, T, C)``."""

    def block(self, index: int, x: Tensor) -> Tensor:
        return self.blocks[index](x)

    @abstractmethod
    def head(self, x: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.stem(inputs)
        for index in range(len(self.blocks)):
            x = self.block(index, x)
        return self.head(x, targets)

    def compile_parts(self, **options: Any) -> None:
        """Compile stem, head, and block by block: equal blocks share one compiled graph."""
        self.stem = torch.compile(self.stem, **options)  # type: ignore[method-assign]
        self.head = torch.compile(self.head, **options)  # type: ignore[method-assign]
        compile_blocks(self, **options)


class VisionHost(Host):
    """A vision transformer with the cross entropy of its classes."""

    def __init__(self, case: ModelCase, mechanism: str, impl: str, depth: int | None) -> None:
        super().__init__()
        name, options = variant(mechanism)
        own: dict[str, Any] = {} if depth is None else {"depth": depth}
        attention = {"impl": impl, "mechanism_options": options}
        self.model = create_vit(case.size, name, img_size=case.pixels, attention=attention, **own)
        self.blocks = self.model.blocks
        self.channels, self.classes, self.pixels = self.model.patch_embed.in_chans, self.model.num_classes, case.pixels

    def stem(self, inputs: Tensor) -> Tensor:
        x, plane = self.model.patch_embed(inputs)
        return self.model._add_positions(x, plane)

    def block(self, index: int, x: Tensor) -> Tensor:
        return self.blocks[index](x, self.model.grid)

    def head(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model.forward_head(self.model.norm(x)).float(), targets)


class BackboneHost(Host):
    """A backbone of timm's registry with the cross entropy of its classes; statistics are those of a whole batch."""

    def __init__(self, case: ModelCase, mechanism: str, impl: str, depth: int | None) -> None:
        super().__init__()
        name, own = variant(mechanism)
        entry = TIMM_MODELS[f"linattn_{case.size}"]
        options: dict[str, Any] = {"mechanism": name, "img_size": case.pixels, "drop_path_rate": 0.0}
        depth = depth or case.depth  # 0: as published
        if not entry.pyramid:
            options["attention"] = {"impl": impl} | ({"mechanism_options": own} if own else {})
            options |= {"depth": depth} if depth else {}
        else:
            options |= {"impl": impl} | ({"mechanism_options": {name: own}} if own else {})
            options |= {"depths": (depth,) * entry.num_depths} if depth else {}
        model: Any = entry(**options)
        self.model = model
        stages = model.stages if entry.pyramid else [model]
        self.blocks = nn.ModuleList(block for stage in stages for block in stage.blocks)
        steps = [stage.downsample for stage in stages if hasattr(stage, "downsample")]
        self.steps = nn.ModuleList([model.stem if entry.pyramid else model.patch_embed, *steps])

    def stem(self, inputs: Tensor) -> Tensor:
        return self.model.forward_features(inputs)

    def head(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model.forward_head(x).float(), targets)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The model calls its own blocks, as stages step down between them."""
        return self.head(self.stem(inputs), targets)

    def compile_parts(self, **options: Any) -> None:
        """Compile steps down, blocks and head, each in place."""
        self.head = torch.compile(self.head, **options)  # type: ignore[method-assign]
        for step in self.steps:
            if not isinstance(step, nn.Identity):
                step.compile(**options)
        compile_blocks(self, **options)


class DecoderBlock(nn.Module):
    """``x += attn(norm(x))``, then ``x += W_o (silu(W_g y) * W_u y)``, ``y = norm(x)``."""

    def __init__(self, case: ModelCase, mechanism: str, impl: str) -> None:
        super().__init__()
        name, options = variant(mechanism)
        self.norm1, self.norm2 = RMSNorm(case.width), RMSNorm(case.width)
        # Without a normaliser the output of a decay grows with what it remembers; the papers norm it by head.
        self.attn = Attention(
            case.width, case.heads, name, causal=True, qkv_bias=False, proj_bias=False, impl=impl,
            norm=None if name == SOFTMAX else "head_rms", mechanism_options=options,
        )  # fmt: skip
        self.gate_up = nn.Linear(case.width, 2 * case.hidden, bias=False)
        self.down = nn.Linear(case.hidden, case.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class LanguageHost(Host):
    """A plain decoder without positions, with a tied embedding and the cross entropy of the next token."""

    def __init__(self, case: ModelCase, mechanism: str, impl: str, depth: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(case.vocabulary, case.width)
        self.blocks = nn.ModuleList(DecoderBlock(case, mechanism, impl) for _ in range(depth or case.depth))
        self.norm = RMSNorm(case.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1 and ".mechanism." not in name:
                nn.init.normal_(parameter, std=0.02)

    def stem(self, inputs: Tensor) -> Tensor:
        return self.embedding(inputs)

    def head(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


HOSTS: dict[str, Callable[..., Host]] = {"vision": VisionHost, "backbone": BackboneHost, "language": LanguageHost}


def create_host(
    case: ModelCase, mechanism: str, device: torch.device, seed: int, *, impl: str = "auto", depth: int | None = None
) -> Host:
    """Build a model in fp32, ready to train; on one device all forms of a mechanism get the same weights.

    Weights are drawn on the device, as a CPU takes seconds for a hundred million of them.
    """
    kind = HOSTS[case.kind]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        host = kind(case, mechanism, impl, depth)
    return host.to(device)  # for tensors that a constructor has put elsewhere


def draw_batch(case: ModelCase, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    if case.kind == "vision":
        sizes = create_vit(case.size, "relu", depth=1, img_size=case.pixels)
        shape = (case.batch, sizes.patch_embed.in_chans, case.pixels, case.pixels)
        images = torch.randn(shape, generator=generator, device=device)
        return images, torch.randint(sizes.num_classes, (case.batch,), generator=generator, device=device)
    if case.kind == "backbone":
        images = torch.randn(case.batch, 3, case.pixels, case.pixels, generator=generator, device=device)
        return images, torch.randint(1000, (case.batch,), generator=generator, device=device)
    text = torch.randint(case.vocabulary, (case.batch, case.tokens + 1), generator=generator, device=device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
