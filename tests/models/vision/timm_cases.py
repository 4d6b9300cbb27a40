"""timm's own models, a thousandth of their size."""

from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor, nn

VIT = {"embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8, "num_classes": 5}
STAGES = {"num_classes": 5, "img_size": 32, "drop_path_rate": 0.0}


def _timm(name: str, **options: Any) -> Callable[..., nn.Module]:
    return lambda **more: timm.create_model(name, pretrained=False, **(options | more))


# Every family, by what its attention has that the others' have not.
FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "vit": _timm("vit_tiny_patch16_224", **VIT, qk_norm=True),
    "deit": _timm("deit_tiny_distilled_patch16_224", **VIT),  # two prefix tokens
    "deit3": _timm("deit3_small_patch16_224", **VIT),  # LayerScale
    "dinov2": _timm("vit_small_patch14_reg4_dinov2", **VIT),  # registers
    "siglip": _timm("vit_base_patch16_siglip_224", **VIT),  # no class token, a pool of attention
    "eva": _timm("eva02_base_patch14_224", **VIT),  # rotary, q, k and v apart, SwiGLU
    "dinov3": _timm("vit_small_patch16_dinov3", **VIT),  # rotary by halves
    "beit": _timm("beit_base_patch16_224", **VIT),  # a bias of positions, none of k
    "swin": _timm(
        "swin_tiny_patch4_window7_224", embed_dim=8, depths=(2, 2), num_heads=(2, 2), window_size=2, **STAGES
    ),
    "pvt": _timm(
        "pvt_v2_b0", embed_dims=(8, 8, 8, 16), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2), num_classes=5
    ),  # fewer keys
}


def build(family: str, stirred: float = 0.3, **options: Any) -> nn.Module:
    """In evaluation, with every parameter off the value it starts from: biases and LayerScale start at or near 0."""
    torch.manual_seed(0)
    model = FAMILIES[family](**options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(stirred * torch.randn_like(p))
    return model.eval()


def pictures(size: int = 32, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(3))
