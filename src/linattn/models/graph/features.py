"""Node features that are nearly all zeros, such as bags of words: on a CPU only the rest of them is worked on."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_FILLED = 0.2  # share of numbers that are not 0 up to which leaving zeros out is the faster way


class Nonzero(NamedTuple):
    """Features ``(N, C)`` without their zeros: row i has ``values[starts[i]:starts[i + 1]]`` in ``columns``."""

    starts: Tensor
    columns: Tensor
    values: Tensor

    def dropped(self, rate: float) -> "Nonzero":
        """Dropout of the features: a zero stays one, dropped or not."""
        return self._replace(values=F.dropout(self.values, rate))


def find_nonzero(x: Tensor) -> Nonzero | None:
    """The numbers of ``x (N, C)`` that are not 0; None where there are many, or a product with all is as good.

    A GPU has to be waited for to count them and multiplies by zeros fast; a compiled graph cannot depend on a count.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.requires_grad or not x.numel():
        return None
    found = x != 0
    if int(found.sum()) > MOST_FILLED * x.numel():
        return None
    counts = found.sum(1)
    return Nonzero(counts.cumsum(0) - counts, found.nonzero()[:, 1], x[found])


def apply_linear(linear: nn.Linear, x: Tensor | Nonzero, *, with_bias: bool = True) -> Tensor:
    """``W x + b`` of features in either form, or ``W x`` alone."""
    bias = linear.bias if with_bias else None
    if isinstance(x, Tensor):
        return F.linear(x, linear.weight, bias)
    found = F.embedding_bag(x.columns, linear.weight.t(), x.starts, mode="sum", per_sample_weights=x.values)
    return found if bias is None else found + bias
