"""Which images belong to which step and process."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.support.options import OptionError
from linattn.train.seeds import mixed_seed


@dataclass(frozen=True)
class Shares:
    """``images`` training images in steps of ``batch_size``, cut evenly between ``processes``.

    The order of an epoch depends on the seed and the epoch alone. Step s has the images at ``s batch_size ...`` of it,
    of which process r has the r-th part: whatever the number of processes, a step has the same images. The rest at the
    end that does not fill a batch is left out, so that every batch has one shape; another epoch has other images there.
    A data set smaller than a batch is one batch.

    Example:
        >>> shares = Shares(images=10, batch_size=4, processes=2, rank=0, seed=0)
        >>> shares.steps, shares.share
        (2, 2)
        >>> shares.indices(epoch=0).shape
        torch.Size([2, 2])
    """

    images: int
    batch_size: int
    processes: int
    rank: int
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.processes:
            raise ValueError(f"rank must be between 0 and processes - 1 = {self.processes - 1}, got {self.rank}")
        if self.batch_size % self.processes:
            raise OptionError(
                "batch_size", f"must be a multiple of the {self.processes} processes, got {self.batch_size}"
            )
        if self.images < self.processes:
            raise ValueError(f"{self.images} training images do not suffice for {self.processes} processes")

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return max(1, self.images // self.batch_size)

    @property
    def share(self) -> int:
        """Images of a step in one process."""
        return min(self.batch_size, self.images) // self.processes

    def check_step(self, first_step: int) -> None:
        """An epoch may be entered at any of its steps, and at its end."""
        if not 0 <= first_step <= self.steps:
            raise ValueError(f"first_step must be between 0 and {self.steps}, got {first_step}")

    def indices(self, epoch: int) -> Tensor:
        """This process's images of an epoch, ``(steps, share)``: one row for each step.

        The order is drawn on the host: it is the same for every device.
        """
        generator = torch.Generator().manual_seed(mixed_seed("order", self.seed, epoch))
        order = torch.randperm(self.images, generator=generator)
        whole = self.share * self.processes
        by_step = order[: self.steps * whole].reshape(self.steps, self.processes, self.share)
        return by_step[:, self.rank]

    def test_indices(self, images: int) -> Iterator[list[int]]:
        """This process's batches of ``images`` test images; all processes together have each image once.

        Processes may have different numbers of images, and of batches.
        """
        own = list(range(self.rank, images, self.processes))
        for start in range(0, len(own), self.share):
            yield own[start : start + self.share]
