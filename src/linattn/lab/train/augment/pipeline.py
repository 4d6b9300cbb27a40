"""Turns the pixels of a data set into inputs of a model."""

import torch
from torch import Tensor

from linattn.lab.train.augment.erasing import random_erasing
from linattn.lab.train.augment.policy import Policy
from linattn.lab.train.augment.rand_augment import RandAugment
from linattn.lab.train.augment.shift import random_crop, random_flip
from linattn.lab.train.config import TrainConfig


class Augment:
    """Crop, flip, RandAugment, normalise, erase, in this order, as far as the config asks for them.

    Args:
        config: which operations to apply, and how strongly.
        mean, std: ``(C,)``, of pixels in [0, 1], on the device of the images. The std of a constant channel would be a
            division by 0: it is taken as one step of 256.
    """

    def __init__(self, config: TrainConfig, mean: Tensor, std: Tensor) -> None:
        self.config = config
        # Pixels are 0..255 from here on, so mean and std must be too.
        self.mean = (mean * 255).float()[:, None, None]
        self.std = (std * 255).clamp_min(1).float()[:, None, None]
        fill = (mean * 255).round().float()
        policy = config.rand_augment
        self.rand_augment = None if policy is None else RandAugment(Policy.parse(policy), fill)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Augment ``(b, C, H, W)`` uint8 to fp32, for training; ``generator``, on the host, is the only randomness."""
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
        """Normalise images, for testing: each channel has mean 0 and variance 1 over the training images."""
        return (images - self.mean) / self.std
