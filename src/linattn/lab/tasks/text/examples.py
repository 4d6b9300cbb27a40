"""Labelled sequences in memory, of one length or of several."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.lab.tasks.text.batch import Sequences


@dataclass(frozen=True, eq=False)
class Examples:
    """N sequences end to end in ``tokens``, with number n from ``offsets[n]`` to ``offsets[n + 1]``; ``labels (N,)``.

    They are not padded: padding all to the longest would take several times the memory for most data.
    """

    tokens: Tensor
    offsets: Tensor
    labels: Tensor
    length: int

    @classmethod
    def of(cls, sequences: Sequence[Tensor], labels: Sequence[float], length: int) -> "Examples":
        sizes = torch.tensor([0, *(len(sequence) for sequence in sequences)])
        return cls(torch.cat(list(sequences)), sizes.cumsum(0), torch.tensor(labels), length)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor, pad: int) -> Sequences:
        """The batch of these rows, padded on the right to ``length``; without a ``key_mask`` if nothing is padded."""
        place = self.offsets[rows, None] + torch.arange(self.length)
        mask = place < self.offsets[rows + 1, None]
        inputs = self.tokens[place.clamp(max=len(self.tokens) - 1)].long().masked_fill(~mask, pad)
        return Sequences(inputs, self.labels[rows], None if bool(mask.all()) else mask)
