"""Splits without leaks: no node is in two parts, and an edge is in one part only, in both its directions.

PyTorch Geometric's RandomLinkSplit draws ordered pairs without an edge: a pair and its reverse may be asked for in two
parts, or the reverse be trained on. Here all pairs are unordered, and all draws come from a seed.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from linattn.lab.tasks.graph.data import GraphData, both_ways, pair_codes, pairs_of
from linattn.lab.tasks.images import stratified, without
from linattn.support.options import OptionError

FEW_PAIRS = 2**18  # up to this many pairs all are listed: exact, however dense the graph is


def stratified_split(data: GraphData, seed: int, *, train: float = 0.6, val: float = 0.2) -> GraphData:
    """Split nodes by shares: ``train`` and ``val`` of each class, the others for testing."""
    y = data.labels
    first = stratified(y, round(train * len(y)), seed)
    rest = without(len(y), first)
    second = rest[stratified(y[rest], round(val * len(y)), seed + 1)]
    return data.with_masks(first, second, without(len(y), torch.cat((first, second))))


def per_class_split(data: GraphData, seed: int, *, train: int = 20, val: int = 500, test: int = 1000) -> GraphData:
    """A random split as in Planetoid: ``train`` nodes of each class, then ``val`` and ``test`` of the others."""
    y = data.labels
    if int(y.bincount().min()) < train or len(y) < train * data.num_classes + val + test:
        raise OptionError(
            "split",
            f"needs {train} nodes of each class, and {val + test} others; {data.name} has {y.bincount().tolist()}",
        )
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    first = torch.cat([order[y[order] == label][:train] for label in range(data.num_classes)])
    rest = order[~torch.isin(order, first)]
    return data.with_masks(first, rest[:val], rest[val : val + test])


@dataclass(frozen=True)
class LabelledPairs:
    """Pairs ``edge_label_index (2, P)`` and ``edge_label (P,)``, 1 for an edge, 0 for none; as in PyTorch Geometric."""

    edge_label_index: Tensor
    edge_label: Tensor

    @classmethod
    def of(cls, positive: Tensor, negative: Tensor) -> "LabelledPairs":
        labels = positive.new_ones(positive.shape[1]), positive.new_zeros(negative.shape[1])
        return cls(torch.cat((positive, negative), 1), torch.cat(labels).float())

    def to(self, device: torch.device | str) -> "LabelledPairs":
        return LabelledPairs(self.edge_label_index.to(device), self.edge_label.to(device))


class NegativeSampler:
    """Draws pairs i < j of ``num_nodes`` nodes that are not in ``forbidden``, sorted codes from ``pair_codes``."""

    def __init__(self, num_nodes: int, forbidden: Tensor) -> None:
        self.num_nodes, self.forbidden = num_nodes, forbidden
        total = num_nodes * (num_nodes - 1) // 2
        self.most = (total - len(forbidden)) // 2  # a draw of more would mostly repeat pairs
        self.listed = torch.empty(0, dtype=torch.int64)
        if total <= FEW_PAIRS:
            first, second = torch.triu_indices(num_nodes, num_nodes, 1)
            codes = first * num_nodes + second
            self.listed = codes[~torch.isin(codes, forbidden)]
            self.most = len(self.listed)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw ``count`` different pairs ``(2, count)``, each pair as likely as any other."""
        if count > self.most:
            raise ValueError(
                f"{count} pairs without an edge are asked for, at most {self.most} can be: too dense a graph"
            )
        drawn = self.listed
        while len(drawn) < count:
            pairs = torch.randint(self.num_nodes, (2, 2 * (count - len(drawn)) + 16), generator=generator)
            codes = pair_codes(pairs, self.num_nodes)
            drawn = torch.unique(torch.cat((drawn, codes[~torch.isin(codes, self.forbidden)])))
        chosen = torch.randperm(len(drawn), generator=generator)[:count]  # shuffled, as they are sorted
        return pairs_of(drawn[chosen], self.num_nodes)


@dataclass(frozen=True)
class LinkSplit:
    """A split of edges. ``data.edge_index`` has only training edges: no message passes over an edge to be predicted."""

    data: GraphData
    train: Tensor
    """Training edges ``(2, P)``, each once, the smaller node first."""
    val: LabelledPairs
    test: LabelledPairs
    sampler: NegativeSampler
    """For training: draws no edge of any part and no pair of the validation or test part."""

    def training_pairs(self, generator: torch.Generator) -> LabelledPairs:
        """All training edges and as many newly drawn pairs without an edge. The two nodes of each are in random order,
        so that a decoder cannot go by it."""
        negative = self.sampler.draw(self.train.shape[1], generator)
        flipped = self._sent(torch.rand(2 * self.train.shape[1], generator=generator) < 0.5)
        pairs = LabelledPairs.of(self.train, self._sent(negative))
        index = pairs.edge_label_index
        return LabelledPairs(torch.where(flipped, index.flip(0), index), pairs.edge_label)

    def _sent(self, drawn: Tensor) -> Tensor:
        """``drawn`` on the device of the edges; it goes to a GPU from pinned memory, so that the host need not wait."""
        device = self.train.device
        return drawn.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else drawn

    def to(self, device: torch.device | str) -> "LinkSplit":
        moved = self.data.to(device), self.train.to(device), self.val.to(device), self.test.to(device)
        return LinkSplit(*moved, self.sampler)


def split_links(data: GraphData, seed: int, *, val: float = 0.05, test: float = 0.1) -> LinkSplit:
    """Set aside random shares of the edges for validation and testing, each with as many pairs without an edge.

    The undirected edges are shuffled and cut, so that both directions of an edge stay together. Pairs without an edge
    are not an edge of any part, and none is in two parts.

    Example:
        >>> from linattn.lab.tasks.graph.generated import grid
        >>> split = split_links(grid(10, 10), seed=0)
        >>> split.train.shape[1], split.data.num_edges, len(split.val.edge_label), len(split.test.edge_label)
        (153, 306, 18, 36)
    """
    nodes = data.num_nodes
    codes = pair_codes(data.edge_index.cpu(), nodes)
    draw = torch.Generator().manual_seed(seed)
    shuffled = codes[torch.randperm(len(codes), generator=draw)]
    counts = [max(1, round(share * len(codes))) for share in (val, test)]
    if sum(counts) >= len(codes):
        raise ValueError(f"{data.name} has {len(codes)} edges, too few to split in three")
    positive = [pairs_of(part, nodes) for part in shuffled.split([*counts, len(codes) - sum(counts)])]
    negative = NegativeSampler(nodes, codes).draw(sum(counts), draw)
    validation, testing = map(LabelledPairs.of, positive[:2], negative.split(counts, 1))
    sampler = NegativeSampler(nodes, torch.cat((codes, pair_codes(negative, nodes))).sort().values)
    message = replace(data, edge_index=both_ways(positive[2], nodes))
    return LinkSplit(message, positive[2], validation, testing, sampler)
