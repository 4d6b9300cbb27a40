"""Splits of nodes: no node is in two parts."""

from dataclasses import replace

import torch
from torch import Tensor

from linattn.lab.tasks.graph.data import GraphData
from linattn.lab.tasks.stratify import stratified, without


def stratified_split(data: GraphData, seed: int, *, train: float = 0.6, val: float = 0.2) -> GraphData:
    """Split nodes by shares: ``train`` and ``val`` of each class, the others for testing.

    Example:
        >>> from linattn.lab.tasks.graph import communities
        >>> found = stratified_split(communities(200, 4), seed=0, train=0.5, val=0.25)
        >>> [int(mask.sum()) for mask in (found.train_mask, found.val_mask, found.test_mask)]
        [100, 50, 50]
    """
    y = _classes(data)
    if not (train > 0 and val > 0 and train + val < 1):
        raise ValueError(f"train and val must be shares > 0 that leave something to test, got {train} and {val}")
    first = stratified(y, round(train * len(y)), seed)
    rest = without(len(y), first)
    second = rest[stratified(y[rest], round(val * len(y)), seed + 1)]
    return with_masks(data, first, second, without(len(y), torch.cat((first, second))))


def per_class_split(data: GraphData, seed: int, *, train: int = 20, val: int = 500, test: int = 1000) -> GraphData:
    """A random split as in Planetoid: ``train`` nodes of each class, then ``val`` and ``test`` of the others."""
    y = _classes(data)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    chosen = []
    for label in range(data.num_classes):
        found = order[y[order] == label]
        if len(found) < train:
            raise ValueError(f"train must be at most {len(found)}, the nodes of class {label}, got {train}")
        chosen.append(found[:train])
    first = torch.cat(chosen)
    left = torch.ones(len(y), dtype=torch.bool)
    left[first] = False
    rest = order[left[order]]
    if len(rest) < val + test:
        raise ValueError(f"val and test must together be at most {len(rest)}, the nodes left, got {val + test}")
    return with_masks(data, first, rest[:val], rest[val : val + test])


def with_masks(data: GraphData, train: Tensor, val: Tensor, test: Tensor) -> GraphData:
    """``data`` with masks for these nodes."""
    masks = torch.zeros(3, data.num_nodes, dtype=torch.bool)
    for mask, chosen in zip(masks, (train, val, test), strict=True):
        mask[chosen] = True
    return replace(data, train_mask=masks[0], val_mask=masks[1], test_mask=masks[2])


def _classes(data: GraphData) -> Tensor:
    if data.y is None:
        raise ValueError(f"{data.name} has no classes y, so its nodes cannot be split by class")
    return data.y
