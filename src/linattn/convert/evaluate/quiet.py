"""Puts a model into a state in which it is only evaluated."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from linattn.convert.training.loop import in_eval


@contextmanager
def quiet(model: Any) -> Iterator[torch.device]:
    """Eval mode without gradients; on exit the model is as it was. Yields the device of its weights."""
    with in_eval(model), torch.no_grad():
        yield next(model.parameters()).device
