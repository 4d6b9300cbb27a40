"""The models that are timed: a decoder, vision transformers and backbones, with any mechanism in any form."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.lab.bench.benchmark import SOFTMAX
from linattn.layers.norms import create_norm
from linattn.layers.rotary import rotations
from linattn.models.language.block import Block, BlockState, Tokens
from linattn.models.language.options import BlockOptions, norm_behind
from linattn.models.vision import create_vit
from linattn.models.vision.catalog import TIMM_MODELS
from linattn.support.compiling import compile_blocks, safe_options
from linattn.support.options import OptionError

# Names in the tables -> mechanism and its options, if the name alone does not say.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"gated-head": ("gated", {"gate": "head"})}


def variant(name: str) -> tuple[str, dict[str, Any]]:
    """The mechanism and its options that a name in the tables stands for."""
    return VARIANTS.get(name, (name, {}))


@dataclass(frozen=True)
class ModelSize:
    """A decoder with a tied embedding."""

    depth: int
    width: int
    heads: int
    hidden: int
    vocabulary: int


# 135 million parameters, and a small size that any machine runs at once.
FULL = ModelSize(depth=30, width=576, heads=9, hidden=1280, vocabulary=49152)
TINY = ModelSize(depth=2, width=32, heads=2, hidden=48, vocabulary=64)


@dataclass(frozen=True)
class ModelCase:
    """One model at one batch size: of images, ``size`` and ``pixels``; or of text, ``decoder`` and ``tokens``.

    ``size``: one of ``create_vit``, or a name of timm's registry without ``linattn_``.
    """

    name: str
    batch: int
    mechanisms: tuple[str, ...] = ()
    size: str = "small"
    pixels: int = 0
    decoder: ModelSize = FULL
    tokens: int = 0
    depth: int = 0  # 0: as published

    @property
    def is_backbone(self) -> bool:
        return f"linattn_{self.size}" in TIMM_MODELS

    @property
    def shape(self) -> str:
        if self.tokens:
            return f"decoder, {self.batch} x {self.tokens} tokens"
        model = self.size if self.is_backbone else f"ViT-{self.size}"
        return f"{model}, {self.batch} images of {self.pixels} pixels"

    @property
    def unit(self) -> str:
        return "tokens" if self.tokens else "images"

    @property
    def units(self) -> int:
        """Number of images or tokens in one step."""
        return self.batch * (self.tokens or 1)

    @property
    def checked(self) -> "ModelCase":
        """The model that is checked in its place, with blocks of every kind but few of them: one or two a stage.

        All blocks of a stage have the same shapes and run the same code. Deep models take long in plain fp32, and at
        its start, with the output of attention normed by head, every block of a decoder amplifies rounding: after
        thirty blocks plain PyTorch in bf16 misses 0.2 to 3 of the gradient, after two 0.015.
        """
        # Every second block with windows is shifted; the first convolution of a stage differs from the others.
        two = self.tokens or self.size.startswith(("polaformer_swin", "qtvit"))
        return replace(self, depth=2 if two else 1)

    def quick(self) -> "ModelCase":
        """A version small enough for any machine that runs the same code."""
        if self.tokens:
            return replace(self, batch=2, tokens=24, decoder=TINY)
        if self.is_backbone:
            return replace(self, batch=2, pixels=64, depth=1)
        return replace(self, batch=2, size="digits", pixels=8)

    def create(self, mechanism: str, device: torch.device, seed: int, impl: str = "auto") -> "Host":
        """Build the model in fp32, ready to train; on one device all forms of a mechanism get the same weights."""
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(seed)
            host = TextModel(self, mechanism, impl) if self.tokens else ImageHost(self, mechanism, impl)
        return host.to(device)  # for tensors that a constructor has put elsewhere

    def draw(self, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
        """Draw images and classes, or tokens and those after them, on the device."""
        generator = torch.Generator(device).manual_seed(seed)
        if self.tokens:
            text = torch.randint(self.decoder.vocabulary, (self.units + 1,), generator=generator, device=device)
            return text[:-1].view(self.batch, -1), text[1:].view(self.batch, -1)
        channels, classes = (1, 10) if self.size == "digits" else (3, 1000)
        images = torch.randn(self.batch, channels, self.pixels, self.pixels, generator=generator, device=device)
        return images, torch.randint(classes, (self.batch,), generator=generator, device=device)


class Host(nn.Module):
    """``forward(inputs, targets)`` returns the loss; ``blocks`` are what is compiled once for all that are equal."""

    blocks: nn.ModuleList
    others: list[nn.Module]  # what is compiled besides, in place
    head: Callable[..., Tensor]
    has_graphs = False  # PyTorch's own CUDA graphs

    def compile_parts(self) -> None:
        """Compile what is before, between and after the blocks, and block by block: equal ones share one graph."""
        options = self._compiler()
        self.head = torch.compile(self.head, dynamic=False, **options)
        for module in self.others:
            module.compile(dynamic=False, **options)
        compile_blocks(self, dynamic=False, **options)

    def compile_whole(self) -> None:
        """Compile everything at once, with PyTorch's own CUDA graphs on a GPU."""
        options = self._compiler()
        self.has_graphs = "options" in options
        if self.has_graphs:
            options["options"] |= {"triton.cudagraphs": True}
        self.compile(dynamic=False, **options)

    def _compiler(self) -> dict[str, Any]:
        return {"options": safe_options()} if next(self.parameters()).is_cuda else {"backend": "eager"}


class TextModel(Host):
    """Tokens ``(B, T)`` to hidden states ``(B, T, C)`` to logits: blocks of ``linattn.models.language``.

    Every mechanism gets the same model, rotary positions included. Without a normaliser the output of a decay grows
    with what it remembers, so mechanisms without a norm of their own get one by head after them, as in their papers.
    """

    def __init__(self, case: ModelCase, mechanism: str, impl: str = "auto") -> None:
        super().__init__()
        (name, own), size = variant(mechanism), case.decoder
        options = BlockOptions(
            dim=size.width, num_heads=size.heads, num_kv_heads=size.heads, mlp_dim=size.hidden, mechanism=name,
            mechanism_options=own, impl="auto" if name == SOFTMAX else impl,
            attention_norm=norm_behind([(name, own)]),
        )  # fmt: skip
        self.rotary_width = options.rotary_width
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(case.depth or size.depth))
        self.norm = create_norm("rms", size.width)
        self.others, self.head = [], self.loss
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1 and ".mechanism." not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.head(self.read(inputs)[0], targets)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x).flatten(0, 1).float(), targets.flatten())

    def read(
        self, inputs: Tensor, states: Sequence[BlockState | None] | None = None, start: Tensor | int = 0
    ) -> tuple[Tensor, list[BlockState]]:
        """Hidden states ``(B, T, C)`` before the last norm and, given ``states`` after ``start`` tokens, the next."""
        x, new = self.embedding(inputs), list[BlockState]()
        positions = start + torch.arange(inputs.shape[1], device=x.device).unsqueeze(0)
        tokens = Tokens(rotations=rotations(positions, [self.rotary_width], 10000.0, x))
        for number, block in enumerate(self.blocks):
            if states is None:
                x = block(x, tokens)
            else:
                assert isinstance(block, Block)
                x, own = block.with_state(x, tokens, states[number])
                new.append(own)
        return x, new

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embedding.weight)


class ImageHost(Host):
    """A vision transformer or a backbone with the cross entropy of its classes.

    The model calls its own blocks, as stages step down between them.
    """

    def __init__(self, case: ModelCase, mechanism: str, impl: str) -> None:
        super().__init__()
        (name, own), entry = variant(mechanism), TIMM_MODELS.get(f"linattn_{case.size}")
        attention = {"impl": impl} | ({"mechanism_options": own} if own else {})
        pyramid = entry is not None and entry.pyramid
        options: dict[str, Any] = {"img_size": case.pixels} | (attention if pyramid else {"attention": attention})
        if case.depth:
            options |= {"depths": (case.depth,) * entry.num_depths} if entry and pyramid else {"depth": case.depth}
        if entry is None:
            model: Any = create_vit(case.size, name, **options)
        else:
            model = entry(mechanism=name, drop_path_rate=0.0, **options)
        self.model, self.head = model, model.forward_head
        stages = model.stages if pyramid else [model]
        self.blocks = nn.ModuleList(block for stage in stages for block in stage.blocks)
        steps = [stage.downsample for stage in stages if hasattr(stage, "downsample")]
        steps = [model.stem if pyramid else model.patch_embed, *steps]
        self.others = [step for step in steps if not isinstance(step, nn.Identity)]

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.model.forward_features(inputs)).float(), targets)


VISION, LANGUAGE = (SOFTMAX, "relu", "nala", "pola", "mirror"), (SOFTMAX, "gated-head", "retention", "gated")
CASES = (
    ModelCase("vit-224", 256, VISION, pixels=224),
    ModelCase("vit-512", 64, VISION, pixels=512),
    ModelCase("language-8192-b1", 1, LANGUAGE, tokens=8192),
    ModelCase("language-8192-b4", 4, LANGUAGE, tokens=8192),
)
# Batch sizes by image size, so that all of them have about as many pixels.
PIXELS = {224: 64, 384: 24, 512: 12, 1024: 4}
# The smallest model of every family, and its version with all stages linear if there is one; and all.
SMALLEST = ("nalaformer_xtiny", "nalaformer_xtiny_linear", "polaformerpp_b0", "rala_tiny", "mirrorla_xtiny",
            "mirrorla_xtiny_linear", "polaformer_pvt_tiny", "polaformer_swin_tiny", "qtvit_1",
            "deit_tiny_lion")  # fmt: skip
GROUPS = {"backbones": SMALLEST, "presets": tuple(name.removeprefix("linattn_") for name in TIMM_MODELS)}


def backbone_case(name: str) -> ModelCase | None:
    """The case named like ``nalaformer_tiny-384``, by a name of timm's registry and a size of ``PIXELS``; or None."""
    size, _, pixels = name.rpartition("-")
    model = TIMM_MODELS.get(f"linattn_{size}")
    if model is None or pixels not in map(str, PIXELS):
        return None
    return ModelCase(name, PIXELS[int(pixels)], (SOFTMAX, model.mechanism), size, int(pixels))


def select(names: tuple[str, ...]) -> list[ModelCase]:
    """The named cases in the order of the table, then backbones in the order given; none: the whole table.

    ``backbones`` stands for the smallest of every family at every size, ``backbones-224`` for these at one size;
    ``presets`` for all models that have a name.
    """
    table, chosen = {case.name: case for case in CASES}, dict[str, ModelCase]()
    for name in names:
        group, _, pixels = name.partition("-")
        sizes = [pixels] if pixels else PIXELS
        for own in [f"{model}-{p}" for model in GROUPS.get(group, ()) for p in sizes] or [name]:
            case = table.get(own) or backbone_case(own)
            if case is None:
                raise OptionError(
                    "only", f"must be one of {', '.join([*table, *GROUPS])}, or a model of timm.list_models("
                    f"'linattn_*') without its prefix and one of {', '.join(map(str, PIXELS))}, such as "
                    f"nalaformer_tiny-384, got {name!r}"
                )  # fmt: skip
            chosen[own] = case
    backbones = [case for name, case in chosen.items() if name not in table]
    return [case for case in CASES if not names or case.name in chosen] + backbones
