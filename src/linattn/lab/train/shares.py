"""Assigns images to steps and processes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.support.options import OptionError
from linattn.support.seeds import mixed_seed


@dataclass(frozen=True)
class Shares:
    """Divides ``images`` training images into steps of ``batch_size``, shared evenly by ``processes``.

    The order of an epoch depends only on the seed and the epoch. Step s has the images from place ``s batch_size`` on,
    of which process r has the r-th part, so that a step has the same images for any number of processes. Images at the
    end that do not fill a batch are left out, so that all batches have one shape; they are others in each epoch. A data
    set smaller than a batch is one batch.

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
        """Number of steps in an epoch."""
        return max(1, self.images // self.batch_size)

    @property
    def share(self) -> int:
        """Number of images of a step in one process."""
        return min(self.batch_size, self.images) // self.processes

    def check_step(self, first_step: int) -> None:
        """Raise unless ``first_step`` is a step of an epoch, or its end."""
        if not 0 <= first_step <= self.steps:
            raise ValueError(f"first_step must be between 0 and {self.steps}, got {first_step}")

    def indices(self, epoch: int) -> Tensor:
        """Indices of this process's images in an epoch, ``(steps, share)``: one row for each step.

        The order is drawn on the host, so it is the same for every device.
        """
        generator = torch.Generator().manual_seed(mixed_seed("order", self.seed, epoch))
        order = torch.randperm(self.images, generator=generator)
        whole = self.share * self.processes
        by_step = order[: self.steps * whole].reshape(self.steps, self.processes, self.share)
        return by_step[:, self.rank]

    def test_indices(self, images: int) -> Iterator[list[int]]:
        """Indices of this process's batches of ``images`` test images; all processes together have each image once.

        Processes may have different numbers of images, and of batches.
        """
        own = list(range(self.rank, images, self.processes))
        for start in range(0, len(own), self.share):
            yield own[start : start + self.share]
