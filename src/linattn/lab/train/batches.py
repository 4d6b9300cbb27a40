"""Batches of images on the training device: which images a step has, and those of a data set that is kept there."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from linattn.lab.tasks.images import ImageData, ImageFolders
from linattn.lab.train.augment.pipeline import Augment
from linattn.lab.train.augment.pixels import to_device
from linattn.lab.train.config import TrainConfig
from linattn.support.extras import need
from linattn.support.options import OptionError
from linattn.support.seeds import mixed_seed, seed_step

# Augmentation is many small operations: a block of several steps takes about as long as one step. This many values,
# counting all channels, are augmented at once; more would only take memory.
BLOCK_VALUES = 2**22
Mixing = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Batches(Protocol):
    """Batches on the training device, with normalised images ``(b, C, H, W)`` fp32."""

    steps_per_epoch: int

    def train(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and targets of an epoch from ``first_step`` on, the same as those of a whole epoch from there on.

        Targets are weights ``(b, num_classes)`` if images are mixed, else labels ``(b,)`` int64. Global random states
        are seeded before each batch is yielded, from the seed, the epoch, the step and the rank, so that a model draws
        the same in that step of a resumed run.
        """
        ...

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Test images and labels ``(b,)``, each once and in order; several processes share them."""
        ...


def create_batches(
    data: ImageData | ImageFolders, config: TrainConfig, device: torch.device, *, rank: int = 0, processes: int = 1
) -> Batches:
    """Create the batches of process ``rank`` of ``processes``; raise ``OptionError`` for options that do not fit.

    Example:
        >>> from linattn.lab.tasks import load_images
        >>> batches = create_batches(load_images("digits"), TrainConfig(batch_size=32), torch.device("cpu"))
        >>> images, labels = next(batches.train(epoch=0))
        >>> batches.steps_per_epoch, images.shape, labels.shape
        (44, torch.Size([32, 1, 8, 8]), torch.Size([32]))
    """
    if isinstance(data, ImageFolders):
        from linattn.lab.train.folders import FolderBatches

        return FolderBatches(data, config, device, rank=rank, processes=processes)
    height, width = data.image_size
    if config.crop_padding >= min(height, width):
        raise OptionError(
            "crop_padding", f"must be below the size of the images, {height}x{width}, got {config.crop_padding}"
        )
    return ResidentBatches(data, config, device, rank=rank, processes=processes)


@dataclass(frozen=True)
class Shares:
    """Divides ``images`` training images into steps of ``batch_size``, shared evenly by ``processes``.

    The order of an epoch depends only on the seed and the epoch. Step s has the images from place ``s batch_size`` on,
    of which process r has the r-th part, so that a step has the same images for any number of processes. Images at the
    end that do not fill a batch are left out, so that all batches have one shape; they are others in each epoch. A data
    set smaller than a batch is one batch.

    Example:
        >>> shares = Shares(images=10, batch_size=4, processes=2, rank=0, seed=0)
        >>> shares.steps, shares.share, shares.indices(epoch=0).shape
        (2, 2, torch.Size([2, 2]))
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
        return order[: self.steps * whole].reshape(self.steps, self.processes, self.share)[:, self.rank]

    def test_indices(self, images: int) -> list[list[int]]:
        """Indices of this process's batches of ``images`` test images; all processes together have each image once.

        Processes may have different numbers of images, and of batches.
        """
        mine = list(range(self.rank, images, self.processes))
        return [mine[start : start + self.share] for start in range(0, len(mine), self.share)]


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
        self.steps_per_block = max(1, BLOCK_VALUES // (self.shares.share * data.train.images[0].numel()))
        self.steps_per_epoch = self.shares.steps

    def train(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
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
        for chosen in self.test_batches:
            yield self.augment.normalise(self.test_images[chosen]), self.test_labels[chosen]


def create_mixing(config: TrainConfig, num_classes: int, batch: int) -> Mixing | None:
    """timm's mixing of ``(b, C, H, W)`` images and ``(b,)`` labels into images and ``(b, num_classes)`` targets.

    Each batch has one weight: ``x = w x + (1 - w) x.flip(0)``, or a rectangle of x is replaced from ``x.flip(0)``. The
    targets, smoothed with ``config.label_smoothing``, get the same weights. If both are on, a batch uses either with
    probability 1/2. Draws come from numpy's global state. Images are changed in place. Returns None if the config does
    not mix.

    Papers: Zhang et al., mixup (arXiv:1710.09412); Yun et al., CutMix (arXiv:1905.04899).
    """
    if not config.mixup and not config.cutmix:
        return None
    if batch % 2:
        raise OptionError("batch_size", f"mixup and cutmix mix pairs: a process's share must be even, got {batch}")
    need("mixup and cutmix", "timm")
    from timm.data.mixup import Mixup

    mixing: Mixing = Mixup(
        mixup_alpha=config.mixup,
        cutmix_alpha=config.cutmix,
        label_smoothing=config.label_smoothing,
        num_classes=num_classes,
    )
    return mixing
