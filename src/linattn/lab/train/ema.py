"""Moving averages of weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """``a <- d a + (1 - d) w`` after every step, for all parameters; ``a`` starts at the weights it is made from.

    Averages are stored beside the model and lent to it for evaluation, so that there is no second model to compile or
    to keep in step. Buffers, such as the statistics of a batch norm, are averages already: evaluation uses those of the
    model.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> _ = nn.init.ones_(model.weight)
        >>> average = WeightAverage(model, decay=0.9)
        >>> _ = nn.init.zeros_(model.weight)
        >>> average.update(model)
        >>> with average.lent_to(model):
        ...     round(model.weight.item(), 4)
        0.9
        >>> model.weight.item()
        0.0
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.average = {name: value.detach().clone() for name, value in model.named_parameters()}
        self._update = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        weights = [value.detach() for value in model.parameters()]
        self._update(list(self.average.values()), weights, 1)

    @contextmanager
    def lent_to(self, model: nn.Module) -> Iterator[None]:
        """Inside the context the model has the averages; afterwards it has its own weights again, to the last bit."""
        own = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.copy_to(model)
        try:
            yield
        finally:
            _overwrite(model, own)

    def copy_to(self, model: nn.Module) -> None:
        _overwrite(model, self.average)

    def load(self, average: dict[str, Tensor]) -> None:
        for name, value in self.average.items():
            value.copy_(average[name])


@torch.no_grad()
def _overwrite(model: nn.Module, values: dict[str, Tensor]) -> None:
    # In place: the optimiser, compiled code and buckets for other processes refer to these very tensors.
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])
