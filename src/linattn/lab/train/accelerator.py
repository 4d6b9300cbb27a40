"""Creates the Accelerator, which knows devices and processes, from a config."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from linattn.support.extras import need
from linattn.support.options import OptionError

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


_PRECISIONS = {"fp32": "no", "bf16": "bf16"}


@contextmanager
def matrix_products(precision: str) -> Iterator[None]:
    """With bf16, let matrix products that stay in fp32 round their factors to TF32, which tensor cores need.

    The factors are mostly bf16 numbers, which TF32 holds exactly, and the sums stay fp32.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "bf16" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def place_of(config: Any) -> torch.device:
    """The device of a config; a GPU if there is one and the config names none."""
    return torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def create_accelerator(config: Any) -> "Accelerator":
    """An Accelerator for the device and precision of a config.

    With ``accelerate launch`` or ``torchrun`` it is that of one of several processes.

    Example:
        >>> from linattn.lab.train.config import TrainConfig
        >>> accelerator = create_accelerator(TrainConfig(device="cpu"))
        >>> accelerator.device, accelerator.num_processes
        (device(type='cpu'), 1)
    """
    need("training", "accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]

    device = place_of(config)
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if alone:
        # accelerate keeps its first device and precision for the whole process and refuses others, but a process that
        # trains several models may need others.
        AcceleratorState._reset_state(reset_partial_state=True)
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
    return Accelerator(mixed_precision=_PRECISIONS[config.precision], cpu=device.type == "cpu")


def check_accelerator(accelerator: "Accelerator", config: Any) -> None:
    """Raise unless an accelerator from elsewhere fits the config."""
    device = place_of(config)
    if accelerator.device.type != device.type:
        raise OptionError("device", f"is {device}, but the accelerator computes on {accelerator.device}")
    given = accelerator.mixed_precision
    if given != _PRECISIONS[config.precision]:
        raise OptionError("precision", f"is {config.precision}, but the accelerator has mixed_precision={given!r}")
