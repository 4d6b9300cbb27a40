"""Scores of predictions, in percent. Functions named ``_tensor`` leave them on the device, so that nothing waits."""

import torch
from torch import Tensor


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Percent of the rows of ``logits (N, classes)`` whose largest entry is at ``labels (N,)``: micro-F1."""
    return float(accuracy_tensor(logits, labels))


def accuracy_tensor(logits: Tensor, labels: Tensor) -> Tensor:
    """:func:`accuracy`, left on the device."""
    return 100 * (logits.argmax(1) == labels).double().mean()


def binary_f1(logits: Tensor, labels: Tensor) -> float:
    """F1 of class 1 in percent, ``2 TP / (2 TP + FP + FN)``, of ``logits (N, 2)`` and ``labels (N,)``; 0 for 0 / 0.

    Example:
        >>> import torch
        >>> binary_f1(torch.eye(2)[[1, 1, 0, 0]], torch.tensor([1, 0, 1, 0]))
        50.0
    """
    if logits.shape[1] != 2:
        raise ValueError(f"logits must be (N, 2), of two classes, got {tuple(logits.shape)}")
    return float(binary_f1_tensor(logits, labels))


def binary_f1_tensor(logits: Tensor, labels: Tensor) -> Tensor:
    """:func:`binary_f1`, left on the device: found and true nodes of class 1 together are ``2 TP + FP + FN``."""
    found, true = logits.argmax(1) == 1, labels == 1
    both = found.double().sum() + true.double().sum()
    return 200 * (found & true).double().sum() / both.clamp(min=1)


def roc_auc(scores: Tensor, labels: Tensor) -> float:
    """Percent of pairs (edge, no edge) in which the edge has the higher score; equal scores count half.

    Computed from the ranks of ``scores (P,)``; ``labels (P,)`` are 1 for an edge and 0 for none.

    Example:
        >>> import torch
        >>> roc_auc(torch.tensor([0.9, 0.5, 0.5, 0.1]), torch.tensor([1, 1, 0, 0]))
        87.5
    """
    if labels.bool().all() or not labels.any():
        raise ValueError("labels must have both kinds, 1 and 0")
    return float(roc_auc_tensor(scores, labels))


def roc_auc_tensor(scores: Tensor, labels: Tensor) -> Tensor:
    """:func:`roc_auc`, left on the device; NaN if all labels are equal."""
    values, positive = scores.detach().double(), labels.double()
    ordered = values.sort().values
    below, up_to = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    rank = (below + up_to + 1) / 2  # from 1; equal scores share the mean of their ranks
    ones = positive.sum()
    return 100 * ((rank * positive).sum() - ones * (ones + 1) / 2) / (ones * (len(values) - ones))


def average_precision(scores: Tensor, labels: Tensor) -> float:
    """Average precision in percent: precision wherever recall grows, weighted by the growth; equal scores are one step.

    Example:
        >>> import torch
        >>> round(average_precision(torch.tensor([0.9, 0.5, 0.1]), torch.tensor([1, 0, 1])), 2)
        83.33
    """
    return float(average_precision_tensor(scores, labels))


def average_precision_tensor(scores: Tensor, labels: Tensor) -> Tensor:
    """:func:`average_precision`, left on the device: the mean over edges of the precision among scores as high."""
    values, positive = scores.detach().double(), labels.double()
    ordered, order = values.sort()
    below = torch.searchsorted(ordered, values)
    lower = positive[order].cumsum(0) - positive[order]  # number of edges before each place
    precision = (positive.sum() - lower[below]) / (len(values) - below)
    return 100 * (precision * positive).sum() / positive.sum()
