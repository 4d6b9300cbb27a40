"""Saving and loading converted models: ``config.json`` with the plan, and the weights in safetensors."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from linattn.convert.convert import convert, linearized_layers
from linattn.convert.plan import Plan
from linattn.support.extras import need

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PLAN = "linearize"  # key of the plan in a config
CORE = ".core."  # part of the names of all new weights


def save_linearized(model: Any, folder: str | Path) -> None:
    """Write a converted model; for a model of transformers, ``model.save_pretrained(folder)`` writes the same files.

    Other files in the folder stay. ``config.json``, without which nothing is loaded, is written last.
    """
    need("saving a converted model", "safetensors")
    from safetensors.torch import save_file

    if not linearized_layers(model):
        raise ValueError("model has no converted layer; save_linearized is for what linattn.convert returns")
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for half in folder.parent.glob(f".{folder.name}-half-????????"):  # of a process that was killed
        shutil.rmtree(half, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-half-") as name:
        new = Path(name)
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(new)
        else:
            config = timm_config(model) | {PLAN: model.linearize_plan.to_dict()}
            save_file({name: x.contiguous() for name, x in model.state_dict().items()}, new / WEIGHTS)
            try:
                text = json.dumps(config, indent=2)
            except TypeError as error:
                raise TypeError(f"{CONFIG} cannot hold what the model was made with: {error}") from error
            (new / CONFIG).write_text(text + "\n")
        folder.mkdir(exist_ok=True)
        files = {file.name for file in new.iterdir()}
        for own in sorted(files, key=lambda own: own == CONFIG):
            os.replace(new / own, folder / own)
        for old in folder.glob("model*.safetensors*"):  # of an earlier model that was cut into other files
            if old.name not in files:
                old.unlink()


def load_linearized(folder: str | Path, **kwargs: Any) -> Any:
    """Load a converted model from a folder, exactly as it was saved; missing or unexpected weights are an error.

    ``kwargs`` go to ``from_pretrained`` (``dtype``, ``device_map``), or to ``timm.create_model``, whose other arguments
    are in the file as far as it can hold them.

    Example:
        >>> import tempfile, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from linattn.convert.convert import convert, plan_model
        >>> from linattn.convert.files import load_linearized, save_linearized
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
        ...                                      num_hidden_layers=1, num_attention_heads=4)).eval()
        >>> _ = convert(model, plan_model(model, "lolcats", window=16))
        >>> folder, ids = tempfile.mkdtemp(), torch.arange(40)[None]
        >>> save_linearized(model, folder)
        >>> torch.equal(load_linearized(folder)(ids).logits, model(ids).logits)
        True
    """
    need("loading a converted model", "safetensors")
    from safetensors.torch import load_file

    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}: it must be a folder that save_linearized wrote")
    config = json.loads((folder / CONFIG).read_text())
    if PLAN not in config:
        raise ValueError(f"{folder / CONFIG} has no entry {PLAN!r}: this model is not converted, load it as usual")
    plan = Plan.from_dict(config[PLAN])
    tensors = {name: x for file in sorted(folder.glob("model*.safetensors")) for name, x in load_file(file).items()}
    if "model_type" not in config:
        return _load_timm(config, plan, tensors, kwargs)
    model, unexpected = _load_transformers(folder, config, kwargs)
    convert(model, plan)
    cores = {name for name in model.state_dict() if CORE in name}
    # For some families, such as ViT, transformers writes older names: the model's are found by their places.
    own = {_place(name): name for name in cores}
    tensors = {own.get(_place(name), name): x for name, x in tensors.items() if CORE in name}
    if wrong := cores ^ tensors.keys():
        raise ValueError(f"the weights in {folder} do not fit its plan: {', '.join(sorted(wrong))}")
    if left := unexpected - cores:
        raise ValueError(f"{folder} holds weights that the model has no place for: {', '.join(sorted(left))}")
    _load_cores(model, tensors)
    return model.eval()


def _load_transformers(folder: Path, config: dict[str, Any], kwargs: dict[str, Any]) -> tuple[Any, set[str]]:
    """The model before its conversion, with all its own weights, and the names of the weights that are not its own."""
    need("loading a converted model", "transformers")
    import transformers

    if "attn_implementation" in kwargs:
        raise ValueError("attn_implementation has no place here: a converted model has an attention of its own")
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # no warnings about unknown weights: cores come later, and every name is checked
    try:
        kind = getattr(transformers, config["architectures"][0])
        model, info = kind.from_pretrained(folder, output_loading_info=True, **kwargs)
    finally:
        logging.set_verbosity(before)
    if wrong := {*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])}:
        raise ValueError(f"{folder} lacks weights of the model, or has others: {', '.join(sorted(wrong))}")
    return model, set(info["unexpected_keys"])


def _place(name: str) -> tuple[str, str]:
    """The numbers in the path of a core, which no renaming changes, and the name inside the core."""
    way, _, inside = name.partition(CORE)
    return " ".join(re.findall(r"\d+", way)), inside


def _load_cores(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load the cores in the dtypes of the file: a model of 16 bits has cores in fp32.

    Tensors are copied, as those of a file may start at any byte: sums over them might be rounded differently than over
    tensors that torch has allocated.
    """
    layers = linearized_layers(model).values()
    for name, layer in model.named_modules():
        if layer in layers:
            device, start = next(layer.parameters()).device, f"{name}{CORE}"
            own = {key: x for key, x in tensors.items() if key.startswith(start)}
            copied = {key.removeprefix(start): x.to(device, copy=True) for key, x in own.items()}
            layer.get_submodule("core").load_state_dict(copied, assign=True)


def timm_config(model: Any) -> dict[str, Any]:
    """What ``config.json`` says of a model of timm: ``architecture``, ``num_classes``, ``model_args``.

    ``model_args`` are the arguments that the model was created with, and what ``reset_classifier`` and
    ``set_input_size`` change later: without them ``timm.create_model`` would build another model.
    """
    source, arguments = getattr(model, "pretrained_cfg", None) or {}, getattr(model, "_model_args", None)
    if not source.get("architecture") or arguments is None:
        raise TypeError(f"{type(model).__name__} is neither a model of transformers nor made by timm.create_model")
    config: dict[str, Any] = {"architecture": source["architecture"], "num_classes": model.num_classes}
    if source.get("tag"):
        config["pretrained_cfg"] = {"tag": source["tag"]}  # the tag says how pictures are prepared
    arguments = {**arguments, "global_pool": model.global_pool, "img_size": list(model.patch_embed.img_size)}
    arguments.pop("num_classes", None)
    return config | {"model_args": arguments}


def _load_timm(config: dict[str, Any], plan: Plan, tensors: dict[str, Tensor], given: dict[str, Any]) -> Any:
    """Load the model of a folder; arguments that are ``given`` take precedence over those of the file."""
    need("loading a converted model of timm", "timm")
    import timm

    name, tag = config["architecture"], config.get("pretrained_cfg", {}).get("tag")
    if tag and timm.get_pretrained_cfg(f"{name}.{tag}", allow_unregistered=False) is not None:
        name = f"{name}.{tag}"
    model = timm.create_model(name, **{"num_classes": config["num_classes"], **config["model_args"], **given})
    convert(model, plan)
    model.load_state_dict({name: x.clone() for name, x in tensors.items()}, assign=True)  # copied as in _load_cores
    return model.eval()
