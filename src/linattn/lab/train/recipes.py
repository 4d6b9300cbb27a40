"""Recipes for images: functions that return a config, to be changed by ``dataclasses.replace``."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from linattn.lab.tasks.images import ImageData, ImageFolders
from linattn.lab.train.config import TrainConfig
from linattn.support.options import check_option


def digits() -> TrainConfig:
    """For the 1,437 training images of scikit-learn's digits, in a host of size ``digits``, ``patch_size=2``, on a CPU.

    It was chosen on held-out training images. The number of steps matters more than that of epochs, hence the small
    batch. 64 tokens (``patch_size=1``) need several times as many steps; shifts by a pixel (``crop_padding=1``) need
    twice as many.
    """
    return TrainConfig(epochs=24, batch_size=32, lr=5e-3, warmup_epochs=2)


def small_images() -> TrainConfig:
    """For tens of thousands of images of about 32 x 32 on one GPU.

    ``flip`` is off, as left and right have a meaning in digits and letters; turn it on for photographs. Many steps are
    needed: with a batch of 1,000 and mixup, a softmax model reached only 86 % on Fashion-MNIST after 18 epochs.
    """
    return TrainConfig(epochs=20, batch_size=250, lr=1e-3, warmup_epochs=2, precision="bf16", device="cuda")


def deit() -> TrainConfig:
    """DeiT's recipe for ImageNet, as used in the vision papers: 1024 images per step, ``lr = 5e-4 batch / 512``.

    Three parts are left out: repeated augmentation, ten more epochs at the lowest rate, and batch norms over all
    processes (NaLaFormer); each process norms its own images.
    """
    return TrainConfig(
        epochs=300,
        batch_size=1024,
        lr=1e-3,
        min_lr=1e-5,
        warmup_epochs=5,
        weight_decay=0.05,
        clip_norm=None,
        label_smoothing=0.1,
        ema_decay=0.99996 ** (1024 / 512),
        mixup=0.8,
        cutmix=1.0,
        rand_augment="m9-mstd0.5-inc1",
        erasing=0.25,
        flip=True,
        precision="bf16",
        device="cuda",
    )


RECIPES: dict[str, Callable[[], TrainConfig]] = {"digits": digits, "small_images": small_images, "deit": deit}


def default_recipe(data: ImageData | ImageFolders) -> str:
    """The name of the default recipe for the kind and size of the data."""
    if isinstance(data, ImageFolders):
        return "deit"
    return "digits" if data.name == "digits" else "small_images"


def configure(recipe: str, changes: Mapping[str, Any]) -> TrainConfig:
    """A recipe with ``changes`` from a command line; None keeps the value of the recipe.

    ``clip_norm`` and ``ema_decay`` of 0 and an empty ``rand_augment`` turn these off. If epochs are given, but no
    warm-up, the recipe's warm-up is cut to the epochs.

    Example:
        >>> config = configure("digits", {"epochs": 1, "lr": None, "clip_norm": 0})
        >>> config.epochs, config.lr == digits().lr, config.clip_norm
        (1, True, None)
    """
    check_option("recipe", recipe, RECIPES)
    given = {name: value for name, value in changes.items() if value is not None}
    for name in ("clip_norm", "ema_decay", "rand_augment"):
        if name in given:
            given[name] = given[name] or None
    config = replace(RECIPES[recipe](), **given)
    if "warmup_epochs" not in given:
        config = replace(config, warmup_epochs=min(config.warmup_epochs, config.epochs))
    return config
