"""The description of how results came about, shared by all laboratories."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from linattn.support.machine import describe_run


def lab_meta(config: Any, device: str, command: list[str] | None) -> dict[str, Any]:
    """The ``meta`` of results: the machine, the command, the seed and every setting of a frozen config."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
    return describe_run(torch.device(device), command) | {"seed": config.seed, "settings": settings}
