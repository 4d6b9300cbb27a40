"""Backbones small enough for a test, and inputs for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from linattn.models.vision import (
    EFFICIENTVIT_SIZES,
    PVT_SIZES,
    SWIN_SIZES,
    Pyramid,
    create_efficientvit,
    create_pvt,
    create_pyramid,
    create_swin,
)

SHALLOW = {"depths": (1, 1, 1, 1), "drop_path_rate": 0.0, "num_classes": 5, "img_size": 64}
NARROW = SHALLOW | {"embed_dims": (16, 24, 32, 32), "num_heads": (1, 2, 2, 4)}
EFFICIENT = SHALLOW | {"widths": (8, 8, 16, 16, 32), "depths": (1,) * 5, "head_dim": 8, "head_widths": (24, 20)}

# One of every kind of host, a thousandth of its size.
HOSTS: dict[str, Callable[..., Any]] = {
    "pyramid": lambda mechanism="nala", **o: Pyramid(mechanism, **NARROW | {"preset": "nala", "head_width": 24} | o),
    "pvt": lambda mechanism="pola", **o: create_pvt("t", mechanism, **NARROW | o),
    "swin": lambda mechanism="pola", **o: create_swin(
        "t", mechanism, **SHALLOW | {"embed_dim": 16, "num_heads": (1, 2, 2, 4), "window": 3} | o
    ),
    "efficientvit": lambda mechanism="quadratic", **o: create_efficientvit("1", mechanism, **EFFICIENT | o),
    "efficientvit_large": lambda mechanism="quadratic", **o: create_efficientvit("4", mechanism, **EFFICIENT | o),
}
DIMS = {
    "pyramid": (16, 24, 32, 32),
    "pvt": (16, 24, 32, 32),
    "swin": (16, 32, 64, 128),
    "efficientvit": (8, 16, 16, 32),
    "efficientvit_large": (8, 16, 16, 32),
}

# Every published preset, by the function that builds it.
PUBLISHED: dict[str, Callable[..., Any]] = {
    **{f"nala {s}": lambda s=s, **o: create_pyramid("nala", s, **o) for s in ("xt", "xt_paper", "t", "s", "b", "l")},
    **{f"pola_plus b{i}": lambda i=i, **o: create_pyramid("pola_plus", f"b{i}", **o) for i in range(6)},
    **{f"rala {s}": lambda s=s, **o: create_pyramid("rala", s, **o) for s in "tsbl"},
    **{f"mirror {s}": lambda s=s, **o: create_pyramid("mirror", s, **o) for s in ("xt", "t", "s", "b", "l")},
    **{f"pvt {s}": lambda s=s, **o: create_pvt(s, **o) for s in PVT_SIZES},
    **{f"swin {s}": lambda s=s, **o: create_swin(s, **o) for s in SWIN_SIZES},
    **{f"qt {s}": lambda s=s, **o: create_efficientvit(s, **o) for s in EFFICIENTVIT_SIZES},
}


def shallow(name: str) -> dict[str, Any]:
    """Options that take a published preset to one block a stage."""
    return SHALLOW | ({"depths": (1,) * 5} if name.startswith("qt") else {})


def build(host: str, *arguments: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return HOSTS[host](*arguments, **options)


def images(height: int = 37, width: int = 53, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1))


def stir(model: nn.Module, size: float = 0.05) -> None:
    """Move every parameter off the values it starts from, where some have no gradient."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=size)


def silent(model: nn.Module) -> list[str]:
    """Names of the parameters that have no gradient, a gradient of 0, or one that is not finite."""
    return [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()]
