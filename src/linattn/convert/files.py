"""Saving and loading converted models: ``config.json`` with the plan, and the weights in safetensors."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from linattn.convert.convert import convert
from linattn.convert.layer.attention import linearized_layers
from linattn.convert.plan import Plan
from linattn.convert.timm_files import load_timm, timm_config
from linattn.support.extras import need

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PLAN = "linearize"  # key of the plan in a config
CORE = ".core."  # part of the names of all new weights


def save_linearized(model: Any, folder: str | Path) -> None:
    """Write a converted model; for a model of transformers, ``model.save_pretrained(folder)`` writes the same files.

    A new folder appears complete or not at all. In an existing folder other files stay, and ``config.json`` is written
    last.
    """
    need("saving a converted model", "safetensors")
    if not linearized_layers(model):
        raise ValueError("model has no converted layer; save_linearized is for what linattn.convert returns")
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        new = Path(name) / "model"
        new.mkdir()
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(new)
        else:
            _save_timm(model, new)
        _put_in_place(new, folder)


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
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}: it must be a folder that save_linearized wrote")
    config = json.loads((folder / CONFIG).read_text())
    if PLAN not in config:
        raise ValueError(f"{folder / CONFIG} has no entry {PLAN!r}: this model is not converted, load it as usual")
    plan, tensors = Plan.from_dict(config[PLAN]), _read_weights(folder)
    if "model_type" not in config:
        return load_timm(folder, config, plan, tensors, kwargs)
    model, unexpected = _load_transformers(folder, config, kwargs)
    convert(model, plan)
    cores = {name for name in model.state_dict() if CORE in name}
    tensors = _in_words_of_model({name: x for name, x in tensors.items() if CORE in name}, cores)
    _check_names(cores, set(tensors), folder)
    left = unexpected - cores
    if left:
        raise ValueError(f"{folder} holds weights that the model has no place for: {', '.join(sorted(left))}")
    _load_cores(model, tensors)
    return model.eval()


def _load_transformers(folder: Path, config: dict[str, Any], kwargs: dict[str, Any]) -> tuple[Any, set[str]]:
    """The model before its conversion, with all its own weights, and the names of the weights that are not its own."""
    need("loading a converted model", "transformers")
    import transformers

    if "attn_implementation" in kwargs:
        raise ValueError("attn_implementation has no place here: a converted model has an attention of its own")
    (name,) = config["architectures"]
    with _only_errors():
        # Files of earlier versions may ask for attention weights, which converted models never returned.
        asked = {"output_attentions": False} if config.get("output_attentions") else {}
        model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True, **(asked | kwargs))
    wrong = {*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])}
    if wrong:
        raise ValueError(f"{folder} lacks weights of the model, or has others: {', '.join(sorted(wrong))}")
    return model, set(info["unexpected_keys"])


@contextmanager
def _only_errors() -> Iterator[None]:
    """Silence transformers' warnings about unknown weights: cores are loaded separately, and every name is checked."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _in_words_of_model(tensors: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    """Rename tensors to the model's ``names``: for some families, such as ViT, transformers writes older names."""
    own = {_place(name): name for name in names}
    return {own.get(_place(name), name): x for name, x in tensors.items()}


def _place(name: str) -> tuple[str, str]:
    """The numbers in the path of a core, which no renaming changes, and the name inside the core."""
    way, _, inside = name.partition(CORE)
    return " ".join(re.findall(r"\d+", way)), inside


def _load_cores(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load the cores in the dtypes of the file: a model of 16 bits has cores in fp32.

    Tensors are copied, as those of a file may start at any byte: sums over them might be rounded differently than over
    tensors that torch has allocated.
    """
    prefixes = {id(module): name for name, module in model.named_modules()}
    for layer in linearized_layers(model).values():
        prefix = f"{prefixes[id(layer)]}.core."
        device = next(layer.parameters()).device
        named = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        own = {name: x.to(device, copy=True) for name, x in named.items()}
        layer.core.load_state_dict(own, assign=True)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no {WEIGHTS}")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _check_names(wanted: set[str], found: set[str], folder: Path) -> None:
    if wanted != found:
        names = ", ".join(sorted(wanted ^ found))
        raise ValueError(f"the weights in {folder} do not fit its plan: {names}")


def _save_timm(model: Any, folder: Path) -> None:
    """Write timm's own format, with the plan added to it."""
    from safetensors.torch import save_file

    config = timm_config(model) | {PLAN: model.linearize_plan.to_dict()}
    save_file({name: x.contiguous() for name, x in model.state_dict().items()}, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _put_in_place(new: Path, folder: Path) -> None:
    if not folder.exists():
        os.rename(new, folder)
        return
    files = sorted(new.iterdir(), key=lambda file: file.name == CONFIG)
    for file in files:
        if file.is_dir():
            shutil.copytree(file, folder / file.name, dirs_exist_ok=True)
        else:
            os.replace(file, folder / file.name)
    for old in folder.glob("model*.safetensors*"):  # of an earlier model that was cut into other files
        if old.name not in {file.name for file in files}:
            old.unlink()
