"""Batches of a data set that is kept on the training device."""

from collections.abc import Iterator

import torch
from torch import Tensor

from linattn.lab.tasks.images import ImageData
from linattn.lab.train.augment import Augment
from linattn.lab.train.augment.host import to_device
from linattn.lab.train.config import TrainConfig
from linattn.lab.train.mixing import create_mixing
from linattn.lab.train.shares import Shares
from linattn.support.seeds import mixed_seed, seed_step

# Augmentation is many small operations: a block of several steps takes about as long as one step. This many values,
# counting all channels, are augmented at once; more would only take memory.
BLOCK_VALUES = 2**22


class ResidentBatches:
    """Copies all images to ``device`` once, as uint8, and cuts, augments, normalises and mixes batches there.

    The steps of an epoch are augmented in blocks, whose randomness depends on the seed, the epoch and the block; that
    of mixing depends on the step. An epoch that is entered at a later step therefore has the same batches from there
    on, bit for bit. Nothing waits for the device.
    """

    def __init__(
        self, data: ImageData, config: TrainConfig, device: torch.device, *, rank: int = 0, processes: int = 1
    ) -> None:
        self.config, self.device, self.rank = config, device, rank
        self.shares = Shares(len(data.train), config.batch_size, processes, rank, config.seed)
        self.mixing = create_mixing(config, data.num_classes, self.shares.share)
        mean, std = data.mean_std()
        self.augment = Augment(config, mean.to(device), std.to(device))
        self.images, self.labels = data.train.images.to(device), data.train.labels.to(device)
        self.test_images, self.test_labels = data.test.images.to(device), data.test.labels.to(device)
        self.test_batches = [torch.tensor(i, device=device) for i in self.shares.test_indices(len(data.test))]
        values = self.shares.share * data.train.images[0].numel()
        self.steps_per_block = max(1, BLOCK_VALUES // values)
        self.steps_per_epoch = self.shares.steps

    def train(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of ``epoch`` from ``first_step`` on: images ``(b, C, H, W)`` fp32 and labels ``(b,)`` int64, or
        targets ``(b, num_classes)`` where images are mixed.

        Global random states are seeded before each batch is yielded, from the seed, the epoch, the step and the rank,
        so that a model draws the same in that step of a resumed run.
        """
        self.shares.check_step(first_step)
        share, size = self.shares.share, self.steps_per_block
        order = to_device(self.shares.indices(epoch), self.device)
        # A block that is entered in its middle is augmented as a whole, for its draws to be the same.
        for start in range(first_step - first_step % size, self.steps_per_epoch, size):
            indices = order[start : start + size].flatten()
            # Its own generator, so that a block does not depend on what happens between two batches.
            generator = torch.Generator().manual_seed(mixed_seed("augment", self.config.seed, epoch, start, self.rank))
            images = self.augment(self.images[indices], generator).split(share)
            labels = self.labels[indices].split(share)
            for step in range(max(first_step, start), min(start + size, self.steps_per_epoch)):
                seed_step(self.config.seed, epoch, step, self.rank)
                batch = images[step - start], labels[step - start]
                yield batch if self.mixing is None else self.mixing(*batch)

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The test images, normalised, and their labels, once and in order; several processes share them."""
        for chosen in self.test_batches:
            yield self.augment.normalise(self.test_images[chosen]), self.test_labels[chosen]
