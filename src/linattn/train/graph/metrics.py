"""Scores of predictions, in percent."""

import torch
from torch import Tensor


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Percent of the rows of ``logits (N, classes)`` whose largest entry is at ``labels (N,)``: micro-F1."""
    return 100 * float((logits.argmax(1) == labels).double().mean())


def roc_auc(scores: Tensor, labels: Tensor) -> float:
    """Percent of pairs (edge, no edge) in which the edge has the higher score; equal scores count half.

    By the ranks of ``scores (P,)``; ``labels (P,)`` are 1 and 0.

    Example:
        >>> import torch
        >>> roc_auc(torch.tensor([0.9, 0.5, 0.5, 0.1]), torch.tensor([1, 1, 0, 0]))
        87.5
    """
    _, place, counts = scores.detach().double().unique(return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0) - (counts - 1) / 2)[place]  # equal scores share the mean of their ranks, from 1
    positive = labels.bool()
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros:
        raise ValueError("labels must have both kinds, 1 and 0")
    return 100 * (float(rank[positive].sum()) - ones * (ones + 1) / 2) / (ones * zeros)


def average_precision(scores: Tensor, labels: Tensor) -> float:
    """Percent: precision where recall grows, summed by how much it grows; equal scores are one step.

    Example:
        >>> import torch
        >>> round(average_precision(torch.tensor([0.9, 0.5, 0.1]), torch.tensor([1, 0, 1])), 2)
        83.33
    """
    values, place, counts = scores.detach().double().unique(return_inverse=True, return_counts=True)
    right = torch.zeros_like(values).index_add_(0, place, labels.double()).flip(0)
    taken = counts.flip(0).cumsum(0)
    return 100 * float((right.cumsum(0) / taken * right).sum() / right.sum())
