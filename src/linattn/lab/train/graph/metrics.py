"""Scores of predictions in percent, fp64, left on the device, so that nothing waits."""

import torch
from torch import Tensor


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """Percent of the rows of ``logits (N, classes)`` whose largest entry is at ``labels (N,)``: micro-F1."""
    return 100 * (logits.argmax(1) == labels).double().mean()


def binary_f1(logits: Tensor, labels: Tensor) -> Tensor:
    """F1 of class 1, ``2 TP / (2 TP + FP + FN)``, of ``logits (N, 2)`` and ``labels (N,)``; 0 for 0 / 0.

    Example:
        >>> import torch
        >>> float(binary_f1(torch.eye(2)[[1, 1, 0, 0]], torch.tensor([1, 0, 1, 0])))
        50.0
    """
    predicted, true = logits.argmax(1) == 1, labels == 1
    both = predicted.double().sum() + true.double().sum()  # 2 TP + FP + FN
    return 200 * (predicted & true).double().sum() / both.clamp(min=1)


def roc_auc(scores: Tensor, labels: Tensor) -> Tensor:
    """Percent of pairs (edge, no edge) in which the edge has the higher score; equal scores count half.

    Computed from the ranks of ``scores (P,)``; ``labels (P,)`` are 1 for an edge and 0 for none. NaN if all are equal.

    Example:
        >>> import torch
        >>> float(roc_auc(torch.tensor([0.9, 0.5, 0.5, 0.1]), torch.tensor([1, 1, 0, 0])))
        87.5
    """
    values, positive = scores.detach().double(), labels.double()
    ordered = values.sort().values
    below, up_to = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    rank = (below + up_to + 1) / 2  # from 1; equal scores share the mean of their ranks
    ones = positive.sum()
    return 100 * ((rank * positive).sum() - ones * (ones + 1) / 2) / (ones * (len(values) - ones))


def average_precision(scores: Tensor, labels: Tensor) -> Tensor:
    """Precision wherever recall grows, weighted by the growth: the mean over edges of the precision among scores as
    high; equal scores are one step.

    Example:
        >>> import torch
        >>> round(float(average_precision(torch.tensor([0.9, 0.5, 0.1]), torch.tensor([1, 0, 1]))), 2)
        83.33
    """
    values, positive = scores.detach().double(), labels.double()
    ordered, order = values.sort()
    below = torch.searchsorted(ordered, values)
    lower = positive[order].cumsum(0) - positive[order]  # number of edges before each place
    precision = (positive.sum() - lower[below]) / (len(values) - below)
    return 100 * (precision * positive).sum() / positive.sum()
