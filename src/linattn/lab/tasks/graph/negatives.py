"""Pairs of nodes without an edge."""

import torch
from torch import Tensor

from linattn.lab.tasks.graph.pairs import contains, pairs_of

FEW_PAIRS = 2**18  # up to this many pairs all are listed: exact, however dense the graph is


class NegativeSampler:
    """Draws pairs i < j of ``num_nodes`` nodes that are not in ``forbidden``, sorted codes from ``pair_codes``."""

    def __init__(self, num_nodes: int, forbidden: Tensor) -> None:
        self.num_nodes, self.forbidden = num_nodes, forbidden
        total = num_nodes * (num_nodes - 1) // 2
        self.available = total - len(forbidden)
        self._all: Tensor | None = None
        if total <= FEW_PAIRS:
            first, second = torch.triu_indices(num_nodes, num_nodes, 1)
            codes = first * num_nodes + second
            self._all = codes[~contains(forbidden, codes)]

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw ``count`` different pairs ``(2, count)``, each pair as likely as any other."""
        if self._all is not None:
            if count > self.available:
                raise ValueError(f"{count} pairs without an edge are asked for, there are {self.available}")
            return pairs_of(self._all[torch.randperm(self.available, generator=generator)[:count]], self.num_nodes)
        if 2 * count > self.available:
            raise ValueError(
                f"{count} pairs without an edge are asked for, of {self.available}: the graph is too dense"
            )
        found = torch.empty(0, dtype=torch.int64)
        while len(found) < count:
            drawn = torch.randint(self.num_nodes, (2, 2 * (count - len(found)) + 16), generator=generator)
            low, high = drawn.min(0).values, drawn.max(0).values
            codes = (low * self.num_nodes + high)[low < high]
            found = torch.unique(torch.cat((found, codes[~contains(self.forbidden, codes)])))
        kept = torch.randperm(len(found), generator=generator)[:count]  # shuffled, as unique has sorted them
        return pairs_of(found[kept], self.num_nodes)
