"""Checks of options, whose errors name the option and what is allowed."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch


class OptionError(ValueError):
    """A wrong option; ``option`` is its name in Python, which has dashes on the command line."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option, self.message = option, message

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.option, self.message)  # else it could not come back from a worker process


class SettingError(OptionError):
    """A wrong setting of a task, which may be given by another option (``--set``) and share its name with others."""


def check_option(option: str, value: object, allowed: Iterable[object]) -> None:
    allowed = list(allowed)
    if value not in allowed:
        raise OptionError(option, f"must be one of {', '.join(map(str, allowed))}, got {value!r}")


def check_integer(option: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(option, f"must be an integer of at least {least}, got {value!r}")


def check_graphs(value: object, device: str) -> None:
    """Check ``graphs`` of a config: to demand CUDA graphs without CUDA is an error, to leave the choice open is not."""
    if value is not None and not isinstance(value, bool):
        raise OptionError("graphs", f"must be True, False or None, got {value!r}")
    if value and not device.startswith("cuda"):
        raise OptionError("graphs", f"CUDA graphs need a GPU, and device is {device}: leave it out, or name cuda")


def check_folder(option: str, path: Path) -> None:
    """Raise unless ``path`` is, or can become, a folder that can be written to."""
    whole = path.absolute()
    place = next(parent for parent in (whole, *whole.parents) if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise OptionError(option, f"must be a folder that can be written to, got {path}")


def options_words(options: Mapping[str, Any]) -> str:
    """Options as they are typed, separated by commas: ``alpha=4, form=normalized``."""
    return ", ".join(f"{key}={value}" for key, value in options.items())


def check_device(device: str) -> None:
    """Raise unless ``device`` is ``cpu``, ``cuda`` or ``cuda:N`` and exists on this machine."""
    kind = device.split(":")[0]
    check_option("device", kind, ("cpu", "cuda"))
    try:
        index = torch.device(device).index or 0
    except RuntimeError as error:
        raise OptionError("device", f"must be cpu, cuda or cuda:N, got {device}") from error
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise OptionError("device", f"{device} is not on this machine; use cpu")
