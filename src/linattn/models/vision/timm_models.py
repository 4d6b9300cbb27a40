"""Adds the backbones to timm's registry, under names ``linattn_*``.

Only importing this module registers them: ``import linattn`` itself stays fast, and nothing else needs timm
(``pip install 'linattn[vision]'``).

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
from typing import Any

from torch import nn

from linattn.models.vision.catalog import TIMM_MODELS, TimmModel

__all__ = ["TIMM_MODELS", "TimmModel", "register_timm_models"]

default_cfgs: dict[str, dict[str, Any]] = {
    name: {
        "input_size": (3, 224, 224),
        "num_classes": 1000,
        "pool_size": (7, 7) if model.pyramid else None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "first_conv": model.first_conv,
        "classifier": model.classifier,
    }
    for name, model in TIMM_MODELS.items()
}  # timm looks them up here, by this name


def register_timm_models() -> None:
    """Add every model of ``TIMM_MODELS`` to timm's registry; names that exist there stay as they are."""
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
    """The function that timm calls; timm knows a model by its function's name and its module's ``default_cfgs``."""

    def create(pretrained: bool = False, **options: Any) -> nn.Module:
        out_indices = options.pop("out_indices", (0, 1, 2, 3) if model.pyramid else 3)
        features = {"flatten_sequential": True} if model.pyramid else {"feature_cls": "getter"}
        features |= {"out_indices": out_indices}
        return build_model_with_cfg(model, name, pretrained, feature_cfg=features, **options)

    create.__name__ = create.__qualname__ = name
    create.__module__ = __name__
    create.__doc__ = f"``{model.build.__name__}{(*model.arguments,)}``, with its options."
    return create


register_timm_models()
