"""Splits of edges for link prediction: an edge is in one part only, in both its directions."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from linattn.lab.tasks.graph.data import GraphData
from linattn.lab.tasks.graph.negatives import NegativeSampler
from linattn.lab.tasks.graph.pairs import both_ways, pair_codes, pairs_of


@dataclass(frozen=True)
class LabelledPairs:
    """Pairs ``edge_label_index (2, P)`` and ``edge_label (P,)``, 1 for an edge, 0 for none; as in PyTorch Geometric."""

    edge_label_index: Tensor
    edge_label: Tensor

    @classmethod
    def of(cls, positive: Tensor, negative: Tensor) -> "LabelledPairs":
        labels = torch.zeros(positive.shape[1] + negative.shape[1], device=positive.device)
        labels[: positive.shape[1]] = 1
        return cls(torch.cat((positive, negative), 1), labels)

    def to(self, device: torch.device | str) -> "LabelledPairs":
        return LabelledPairs(self.edge_label_index.to(device), self.edge_label.to(device))


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
        turned = torch.rand(2 * self.train.shape[1], generator=generator) < 0.5
        found = LabelledPairs.of(self.train, self._sent(negative))
        index = torch.where(self._sent(turned), found.edge_label_index.flip(0), found.edge_label_index)
        return LabelledPairs(index, found.edge_label)

    def _sent(self, drawn: Tensor) -> Tensor:
        """``drawn`` on the device of the edges; it goes to a GPU from pinned memory, so that the host need not wait."""
        device = self.train.device
        return drawn.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else drawn.to(device)

    def to(self, device: torch.device | str) -> "LinkSplit":
        moved = self.data.to(device), self.train.to(device), self.val.to(device), self.test.to(device)
        return LinkSplit(*moved, self.sampler)


def split_links(data: GraphData, seed: int, *, val: float = 0.05, test: float = 0.1) -> LinkSplit:
    """Set aside random shares of the edges for validation and testing, each with as many pairs without an edge.

    The undirected edges are shuffled and cut, so that both directions of an edge stay together. Pairs without an edge
    are not an edge of any part, and none is in two parts.

    Example:
        >>> from linattn.lab.tasks.graph import grid
        >>> found = split_links(grid(10, 10), seed=0)
        >>> found.train.shape[1], found.data.num_edges, len(found.val.edge_label), len(found.test.edge_label)
        (153, 306, 18, 36)
    """
    if not (val > 0 and test > 0 and val + test < 1):
        raise ValueError(f"val and test must be shares > 0 that leave something to train on, got {val} and {test}")
    nodes = data.num_nodes
    codes = pair_codes(data.edge_index.cpu(), nodes)
    draw = torch.Generator().manual_seed(seed)
    shuffled = codes[torch.randperm(len(codes), generator=draw)]
    counts = [max(1, round(share * len(codes))) for share in (val, test)]
    if sum(counts) >= len(codes):
        raise ValueError(f"{data.name} has {len(codes)} edges, too few to split in three")
    parts = shuffled.split([*counts, len(codes) - sum(counts)])
    validation, testing, training = (pairs_of(part, nodes) for part in parts)
    negative = NegativeSampler(nodes, codes).draw(sum(counts), draw)
    held_out = pair_codes(negative, nodes)
    message = replace(data, edge_index=both_ways(training, nodes), edge_weight=None)
    return LinkSplit(
        message,
        training,
        LabelledPairs.of(validation, negative[:, : counts[0]]),
        LabelledPairs.of(testing, negative[:, counts[0] :]),
        NegativeSampler(nodes, torch.cat((codes, held_out)).sort().values),
    )
