"""From the pixels of a data set to what a model sees."""

import torch
from torch import Tensor

from linattn.train.augment.erasing import random_erasing
from linattn.train.augment.policy import Policy
from linattn.train.augment.rand_augment import RandAugment
from linattn.train.augment.shift import random_crop, random_flip
from linattn.train.config import TrainConfig


class Augment:
    """Crop, flip, RandAugment, normalise, erase: those of them that the config asks for, in this order.

    Args:
        config: which, and how strong.
        mean, std: ``(C,)`` of pixels in [0, 1], on the device of the images. A channel that is constant has no spread
            to divide by: its std is taken as one step of 256.
    """

    def __init__(self, config: TrainConfig, mean: Tensor, std: Tensor) -> None:
        self.config = config
        # Pixels are 0..255 here, so the mean and the spread are too.
        self.mean = (mean * 255).float()[:, None, None]
        self.std = (std * 255).clamp_min(1).float()[:, None, None]
        fill = (mean * 255).round().float()
        policy = config.rand_augment
        self.rand_augment = None if policy is None else RandAugment(Policy.parse(policy), fill)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Images to train on: ``(b, C, H, W)`` uint8 to fp32; all randomness comes from ``generator``, on the host."""
        if self.config.crop_padding:
            images = random_crop(images, self.config.crop_padding, generator)
        if self.config.flip:
            images = random_flip(images, generator)
        if self.rand_augment is not None:
            images = self.rand_augment(images, generator)
        normalised = self.normalise(images)
        if self.config.erasing:
            normalised = random_erasing(normalised, self.config.erasing, generator)
        return normalised

    def normalise(self, images: Tensor) -> Tensor:
        """Images to test on: mean 0 and variance 1 over the training images, for each channel."""
        return (images - self.mean) / self.std
