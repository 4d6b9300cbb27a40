"""Weights that accelerate keeps elsewhere between calls: ``cpu_offload``, ``disk_offload``, ``device_map``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

HOOK = "_hf_hook"  # attribute in which accelerate keeps its hook around a module's forward


def is_offloaded(module: nn.Module) -> bool:
    """Whether accelerate brings the weights of parts of ``module`` only for the forward call of each part.

    It hooks either all parts with weights of their own or none, so the first one decides.
    """
    for part in module.modules():
        if any(x is not None for own in (part._parameters, part._buffers) for x in own.values()):
            return HOOK in vars(part)
    return False


@contextmanager
def weights_here(*modules: nn.Module) -> Iterator[None]:
    """Hold all weights of ``modules`` on the device that they compute on, until the block ends.

    Accelerate brings a part's weights for its own forward and removes them afterwards, so another method that reads
    them, such as a decoding step, would find none.
    """
    parts: list[Any] = [part for module in modules for part in module.modules() if HOOK in vars(part)]
    wrapped = [part.forward for part in parts]
    for part in parts:
        part._hf_hook.pre_forward(part)
        part.forward = part._old_forward  # else weights would be removed after the first call inside
    try:
        yield
    finally:
        for part, forward in zip(parts, wrapped, strict=True):
            part.forward = forward
            part._hf_hook.post_forward(part, None)
