"""All published models by name, each with its builder and arguments; read by timm's registry and benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from linattn.layers.presets import preset as find_preset
from linattn.models.vision.efficientvit import EFFICIENTVIT_SIZES, create_efficientvit
from linattn.models.vision.pvt import create_pvt
from linattn.models.vision.pyramid import create_pyramid
from linattn.models.vision.swin import create_swin
from linattn.models.vision.vit import create_deit_lion

_WORDS = {"xt": "xtiny", "xt_paper": "xtiny_paper", "t": "tiny", "s": "small", "m": "medium", "b": "base", "l": "large"}


@dataclass(frozen=True)
class TimmModel:
    """What a name stands for: a function that builds the model, and its arguments."""

    build: Callable[..., nn.Module]
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    mechanism: str = ""  # the paper's mechanism, in the stages that are not softmax
    first_conv: str = "stem.0"
    classifier: str = "head.fc"
    pyramid: bool = True  # has planes with strides 4, 8, 16, 32; else blocks of a single stride
    num_depths: int = 4  # number of values in its option depths, which may count convolutions before the stages

    def __call__(self, **options: Any) -> nn.Module:
        return self.build(*self.arguments, **(self.options | options))


def _models() -> dict[str, TimmModel]:
    """All models by name; each pyramid also has a version without softmax, ``..._linear``."""
    pyramids = {
        "nalaformer": ("nala", ("xt", "xt_paper", "t", "s", "b", "l")),
        "polaformerpp": ("pola_plus", ("b0", "b1", "b2", "b3", "b4", "b5")),
        "rala": ("rala", ("t", "s", "b", "l")),
        "mirrorla": ("mirror", ("xt", "t", "s", "b", "l")),
    }
    models = {}
    for family, (preset, sizes) in pyramids.items():
        for size in sizes:
            name = f"linattn_{family}_{_WORDS.get(size, size)}"
            own = find_preset(preset).mechanism
            models[name] = TimmModel(create_pyramid, (preset, size), mechanism=own)
            models[f"{name}_linear"] = TimmModel(create_pyramid, (preset, size), {"stages": "llll"}, own)
    for size in "tsml":
        name = f"linattn_polaformer_pvt_{_WORDS[size]}"
        models[name] = TimmModel(create_pvt, (size,), mechanism="pola", first_conv="stem.embed.proj")
    for size in "tsb":
        name = f"linattn_polaformer_swin_{_WORDS[size]}"
        models[name] = TimmModel(create_swin, (size,), mechanism="pola", first_conv="stem.embed.proj")
    for size in EFFICIENTVIT_SIZES:
        models[f"linattn_qtvit_{size}"] = TimmModel(
            create_efficientvit, (size,), mechanism="quadratic", first_conv="stem.0.conv", num_depths=5
        )
    for size in ("tiny", "small", "base"):
        models[f"linattn_deit_{size}_lion"] = TimmModel(
            create_deit_lion, (size,), mechanism="lion", first_conv="patch_embed.proj", classifier="head", pyramid=False
        )
    return models


TIMM_MODELS = _models()
