"""Starts a model from the weights of another run."""

from pathlib import Path
from typing import Any

from linattn.lab.train.text.folder import WEIGHTS
from linattn.support.options import OptionError


def take_weights(model: Any, folder: Path) -> list[str]:
    """Copy the parameters of ``model`` that ``folder`` has; return the names of the others, a new head.

    A folder whose body does not fit entirely is refused.
    """
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    if not path.is_file():
        raise OptionError("start", f"must be the folder of a trained model with {WEIGHTS}, got {folder}")
    found, own = load_file(path), model.state_dict()
    body = {name: value for name, value in found.items() if name.startswith("model.")}
    wrong = [name for name in own if name.startswith("model.") and name not in body]
    wrong += [name for name, value in body.items() if name not in own or own[name].shape != value.shape]
    if wrong:
        raise OptionError("start", f"{folder} holds another model: {', '.join(sorted(set(wrong))[:3])} does not fit")
    same = {name: value for name, value in found.items() if name in own and own[name].shape == value.shape}
    model.load_state_dict(same, strict=False)
    return [name for name in own if name not in same]
