"""Sparse node features such as bags of words: on a CPU only the numbers that are not zero are computed with."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_FILLED = 0.2  # up to this share of nonzero numbers, skipping zeros is faster


class Nonzero(NamedTuple):
    """Features ``(N, C)`` without their zeros: row i has ``values[starts[i]:starts[i + 1]]`` in ``columns``."""

    starts: Tensor
    columns: Tensor
    values: Tensor

    def dropped(self, rate: float) -> "Nonzero":
        """Apply dropout to the features; zeros stay zeros whether or not they are dropped."""
        return self._replace(values=F.dropout(self.values, rate))


def find_nonzero(x: Tensor) -> Nonzero | None:
    """The nonzero numbers of ``x (N, C)``; None if there are many, or if a dense product is as good.

    A dense product is better on a GPU, which multiplies zeros fast and would have to be waited for to count them, and
    in compiled graphs, which cannot depend on a count.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.requires_grad or not x.numel():
        return None
    found = x != 0
    if int(found.sum()) > MOST_FILLED * x.numel():
        return None
    counts = found.sum(1)
    return Nonzero(counts.cumsum(0) - counts, found.nonzero()[:, 1], x[found])


def apply_linear(linear: nn.Linear, x: Tensor | Nonzero, *, with_bias: bool = True) -> Tensor:
    """``W x + b`` for features in either form, or ``W x`` without the bias."""
    bias = linear.bias if with_bias else None
    if isinstance(x, Tensor):
        return F.linear(x, linear.weight, bias)
    found = F.embedding_bag(x.columns, linear.weight.t(), x.starts, mode="sum", per_sample_weights=x.values)
    return found if bias is None else found + bias
