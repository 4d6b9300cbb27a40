"""Stratified subsets: every class keeps its share of a labelled set."""

from collections import Counter

import torch
from torch import Tensor


def stratified(labels: Tensor, count: int, seed: int) -> Tensor:
    """``count`` indices into ``labels (N,)``, sorted, drawn so that class c gets ``count n_c / N`` of them within one.

    The images of each class are shuffled, and the r-th of a class of n is placed at ``(r + 1/2) / n``. The first
    ``count`` images by place are taken, which gives exactly ``count``, and each class its share.

    Example:
        >>> import torch
        >>> labels = torch.tensor([0] * 8 + [1] * 4)
        >>> labels[stratified(labels, 6, seed=0)].tolist()
        [0, 0, 0, 0, 1, 1]
    """
    total = len(labels)
    if not 0 <= count <= total:
        raise ValueError(f"count must be between 0 and the number of labels {total}, got {count}")
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    by_class = shuffled[labels.cpu()[shuffled].argsort(stable=True)]
    sizes = labels.cpu().bincount()
    first = sizes.cumsum(0) - sizes
    size = sizes.repeat_interleave(sizes)
    rank = torch.arange(total) - first.repeat_interleave(sizes)
    place = (rank.double() + 0.5) / size
    # Classes of equal size tie at every place: a second shuffle breaks ties, rather than the order of the classes.
    again = torch.randperm(total, generator=torch.Generator().manual_seed(seed + 1))
    return by_class[again[place[again].argsort(stable=True)[:count]]].sort().values


def without(total: int, indices: Tensor) -> Tensor:
    """The indices below ``total`` that are not in ``indices``, sorted."""
    kept = torch.ones(total, dtype=torch.bool)
    kept[indices] = False
    return kept.nonzero()[:, 0]


def across_classes(labels: Tensor, count: int, seed: int = 0) -> Tensor:
    """At most ``count`` indices into ``labels (N,)``: one of each class in random order, then a second of each, ...

    Example:
        >>> labels = torch.tensor([0] * 50 + [1] * 50)
        >>> sorted(labels[across_classes(labels, 4)].tolist())
        [0, 0, 1, 1]
    """
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    seen: Counter[int] = Counter()
    rank = []
    for label in labels.cpu()[shuffled].tolist():
        rank.append(seen[label])
        seen[label] += 1
    return shuffled[torch.tensor(rank).argsort(stable=True)[:count]]
