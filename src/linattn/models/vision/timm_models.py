"""The backbones in timm's registry, under names ``linattn_*``.

Importing this module registers them, and nothing else does: ``import linattn`` stays as quick as it is, and timm is
needed here alone (``pip install 'linattn[vision]'``).

    import timm
    import linattn.models.vision.timm_models

    timm.list_models("linattn_*")
    model = timm.create_model("linattn_nalaformer_tiny", num_classes=10)
    model = timm.create_model("linattn_nalaformer_tiny", mechanism="mirror")    # another mechanism in its linear stages
    planes = timm.create_model("linattn_rala_small_linear", features_only=True)  # strides 4, 8, 16, 32

Options of the model's class pass through ``create_model``. There are no trained weights.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from linattn.models.vision.efficientvit import EFFICIENTVIT_SIZES, create_efficientvit
from linattn.models.vision.pvt import create_pvt
from linattn.models.vision.pyramid_sizes import create_pyramid
from linattn.models.vision.swin import create_swin

__all__ = ["TIMM_MODELS", "TimmModel", "register_timm_models"]

_WORDS = {"xt": "xtiny", "xt_paper": "xtiny_paper", "t": "tiny", "s": "small", "m": "medium", "b": "base", "l": "large"}


@dataclass(frozen=True)
class TimmModel:
    """What stands behind a name: a function that builds the model, and its arguments."""

    build: Callable[..., nn.Module]
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    first_conv: str = "stem.0"

    def __call__(self, **options: Any) -> nn.Module:
        return self.build(*self.arguments, **(self.options | options))


def _models() -> dict[str, TimmModel]:
    """All of them by name; pyramids have a twin without softmax, ``..._linear``."""
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
            models[name] = TimmModel(create_pyramid, (preset, size))
            models[f"{name}_linear"] = TimmModel(create_pyramid, (preset, size), {"stages": "llll"})
    for size in "tsml":
        models[f"linattn_polaformer_pvt_{_WORDS[size]}"] = TimmModel(create_pvt, (size,), first_conv="stem.embed.proj")
    for size in "tsb":
        models[f"linattn_polaformer_swin_{_WORDS[size]}"] = TimmModel(
            create_swin, (size,), first_conv="stem.embed.proj"
        )
    for size in EFFICIENTVIT_SIZES:
        models[f"linattn_qtvit_{size}"] = TimmModel(create_efficientvit, (size,), first_conv="stem.0.conv")
    return models


TIMM_MODELS = _models()
default_cfgs: dict[str, dict[str, Any]] = {
    name: {
        "input_size": (3, 224, 224),
        "num_classes": 1000,
        "pool_size": (7, 7),
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "first_conv": model.first_conv,
        "classifier": "head.fc",
    }
    for name, model in TIMM_MODELS.items()
}  # timm looks them up here, by this name


def register_timm_models() -> None:
    """Put every model of ``TIMM_MODELS`` into timm's registry; names that are there already stay."""
    try:
        timm_models = importlib.import_module("timm.models")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "timm":
            raise
        raise ImportError("these models are registered with timm: pip install 'linattn[vision]'") from error
    for name, model in TIMM_MODELS.items():
        if not timm_models.is_model(name):
            # timm adds the name to this module's __all__, so the module must have it.
            globals()[name] = timm_models.register_model(_entry_point(name, model, timm_models.build_model_with_cfg))


def _entry_point(
    name: str, model: TimmModel, build_model_with_cfg: Callable[..., nn.Module]
) -> Callable[..., nn.Module]:
    """The function that timm calls: it knows a model by the function's name, and its module's ``default_cfgs``."""

    def create(pretrained: bool = False, **options: Any) -> nn.Module:
        out_indices = options.pop("out_indices", (0, 1, 2, 3))
        features = {"flatten_sequential": True, "out_indices": out_indices}
        return build_model_with_cfg(model, name, pretrained, feature_cfg=features, **options)

    create.__name__ = create.__qualname__ = name
    create.__module__ = __name__
    create.__doc__ = f"``{model.build.__name__}{(*model.arguments,)}``, with its options."
    return create


register_timm_models()
