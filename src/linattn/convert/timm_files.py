"""What ``config.json`` says of a converted model of timm: ``architecture``, ``num_classes``, ``model_args``.

``model_args`` are the arguments that the model was created with, plus later changes (``reset_classifier``,
``set_input_size``): without them ``timm.create_model`` would build another model. Older files have none.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linattn.convert.convert import convert
from linattn.convert.plan import Plan
from linattn.support.extras import need

ELSEWHERE = "not_in_this_file"  # names of arguments that JSON cannot hold

# Arguments of creation that can be read off a model.
SHOWN: dict[str, Callable[[Any], Any]] = {
    "num_classes": lambda model: model.num_classes,
    "global_pool": lambda model: model.global_pool,
    "img_size": lambda model: list(model.patch_embed.img_size),
    "patch_size": lambda model: list(model.patch_embed.patch_size),
    "in_chans": lambda model: model.in_chans if hasattr(model, "in_chans") else model.patch_embed.proj.in_channels,
    "class_token": lambda model: model.cls_token is not None,
    "reg_tokens": lambda model: 0 if model.reg_token is None else model.reg_token.shape[1],
    "fc_norm": lambda model: not isinstance(model.fc_norm, nn.Identity),
    "no_embed_class": lambda model: model.no_embed_class,
    "dynamic_img_size": lambda model: model.dynamic_img_size,
    "embed_dim": lambda model: model.embed_dim,
    "depth": lambda model: len(model.blocks),
    "num_heads": lambda model: model.blocks[0].attn.num_heads,
}
# By how a parameter's name begins: the arguments that may be wrong if its weight does not fit.
TOLD_BY = {
    "patch_embed.": ("in_chans", "patch_size", "embed_dim"),
    "pos_embed": ("img_size", "patch_size", "class_token", "reg_tokens"),
    "cls_token": ("class_token",),
    "reg_token": ("reg_tokens",),
    "head.": ("num_classes",),
    "norm.": ("global_pool", "fc_norm"),
    "fc_norm.": ("global_pool", "fc_norm"),
    "attn_pool.": ("global_pool",),
}


def timm_config(model: Any) -> dict[str, Any]:
    """The fields of ``config.json`` from which :func:`load_timm` builds the model again."""
    source = getattr(model, "pretrained_cfg", None) or {}
    if not source.get("architecture"):
        raise TypeError(f"{type(model).__name__} is neither a model of transformers nor made by timm.create_model")
    config: dict[str, Any] = {"architecture": source["architecture"], "num_classes": model.num_classes}
    if source.get("tag"):
        config["pretrained_cfg"] = {"tag": source["tag"]}  # the tag says how pictures are prepared
    arguments = _arguments(model, config)
    written = {name: x for name, x in arguments.items() if _in_json(x)}
    config["model_args"] = written
    if written.keys() != arguments.keys():
        config[ELSEWHERE] = sorted(arguments.keys() - written.keys())
    return config


def load_timm(
    folder: Path, config: dict[str, Any], plan: Plan, tensors: dict[str, Tensor], given: dict[str, Any]
) -> Any:
    """Load the model of a folder; arguments that are ``given`` take precedence over those of the file."""
    need("loading a converted model of timm", "timm")
    missing = [name for name in config.get(ELSEWHERE, ()) if name not in given]
    if missing:
        raise ValueError(
            f"the model in {folder} was made with {missing[0]}, which its file cannot hold: give it to "
            f"load_linearized(folder, {missing[0]}=...) as it was given to timm.create_model"
        )
    model = _create(config, config.get("model_args", {}) | given)
    convert(model, plan)
    _check_fit(tensors, model.state_dict(), folder, config["architecture"])
    model.load_state_dict({name: x.clone() for name, x in tensors.items()}, assign=True)  # copied: see files.py
    return model.eval()


def _create(config: dict[str, Any], arguments: dict[str, Any]) -> Any:
    import timm

    name, tag = config["architecture"], config.get("pretrained_cfg", {}).get("tag")
    tagged = f"{name}.{tag}"
    known = tag and timm.get_pretrained_cfg(tagged, allow_unregistered=False) is not None
    return timm.create_model(tagged if known else name, **{"num_classes": config["num_classes"], **arguments})


def _arguments(model: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The arguments the model was created with, as newer timm keeps them, and those that it has changed since."""
    arguments = dict(getattr(model, "_model_args", {}))
    for _ in range(2):  # one argument may decide the default of another
        with torch.device("meta"):
            like = _shown(_create(config, arguments))
        changed = {name: x for name, x in _shown(model).items() if x != like.get(name)}
        if not changed:
            break
        arguments |= changed
    return arguments


def _shown(model: Any) -> dict[str, Any]:
    found = {}
    for name, show in SHOWN.items():
        try:
            found[name] = show(model)
        except (AttributeError, TypeError):  # models of another class may lack this argument
            continue
    return found


def _in_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _check_fit(tensors: dict[str, Tensor], own: dict[str, Tensor], folder: Path, architecture: str) -> None:
    """Raise if weights differ in shape or name, naming the arguments that may be the reason."""
    file, model = ({name: tuple(x.shape) for name, x in each.items()} for each in (tensors, own))
    wrong = [name for name in {**model, **file} if file.get(name) != model.get(name)]
    if not wrong:
        return
    told = {
        argument for name in wrong for begin, some in TOLD_BY.items() if name.startswith(begin) for argument in some
    }
    has, wants = (each.get(wrong[0], "none") for each in (file, model))
    raise ValueError(
        f"the weights in {folder} do not fit timm's {architecture}: {wrong[0]} is {has} in the file and {wants} in the "
        f"model. Give load_linearized(folder, ...) the arguments that the model was made with"
        + (f": perhaps {', '.join(name for name in SHOWN if name in told)}" if told else "")
    )
