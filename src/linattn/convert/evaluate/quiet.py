"""Puts a model into a state in which it is only evaluated."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def quiet(model: Any) -> Iterator[torch.device]:
    """Eval mode without gradients; on exit the model is as it was. Yields the device of its weights.

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> with quiet(layer) as device:
        ...     device.type, layer.training, torch.is_grad_enabled()
        ('cpu', False, False)
        >>> layer.training
        True
    """
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        for module, was in training.items():
            module.training = was
