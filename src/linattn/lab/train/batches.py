"""Batches of images for the training loop."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from linattn.lab.tasks.images import ImageData, ImageFolders
from linattn.lab.train.augment.policy import Policy
from linattn.lab.train.config import TrainConfig
from linattn.lab.train.folders import FolderBatches
from linattn.lab.train.resident import ResidentBatches
from linattn.support.options import OptionError


class Batches(Protocol):
    """Batches on the training device, with normalised images ``(b, C, H, W)`` fp32."""

    steps_per_epoch: int

    def train(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and targets of an epoch from ``first_step`` on, the same as those of a whole epoch from there on.

        Targets are weights ``(b, num_classes)`` if images are mixed, else labels ``(b,)`` int64.
        """
        ...

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Test images and labels ``(b,)``, each once; several processes share them."""
        ...


def create_batches(
    data: ImageData | ImageFolders,
    config: TrainConfig,
    device: torch.device,
    *,
    rank: int = 0,
    processes: int = 1,
) -> Batches:
    """Create the batches of process ``rank`` of ``processes``; raise ``OptionError`` for options that do not fit.

    Example:
        >>> import torch
        >>> from linattn.lab.tasks import load_images
        >>> from linattn.lab.train.config import TrainConfig
        >>> batches = create_batches(load_images("digits"), TrainConfig(batch_size=32), torch.device("cpu"))
        >>> images, labels = next(batches.train(epoch=0))
        >>> batches.steps_per_epoch, images.shape, labels.shape
        (44, torch.Size([32, 1, 8, 8]), torch.Size([32]))
    """
    config.check()
    if config.rand_augment is not None:
        Policy.parse(config.rand_augment)
    if isinstance(data, ImageFolders):
        return FolderBatches(data, config, device, rank=rank, processes=processes)
    if config.crop_padding >= min(data.image_size):
        height, width = data.image_size
        raise OptionError(
            "crop_padding", f"must be below the size of the images, {height}x{width}, got {config.crop_padding}"
        )
    return ResidentBatches(data, config, device, rank=rank, processes=processes)
