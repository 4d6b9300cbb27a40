"""Mixup and cutmix: blend the images of a batch in pairs, and their targets too."""

from collections.abc import Callable

from torch import Tensor

from linattn.lab.train.config import TrainConfig
from linattn.support.extras import need
from linattn.support.options import OptionError

Mixing = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


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

    return Mixup(
        mixup_alpha=config.mixup,
        cutmix_alpha=config.cutmix,
        label_smoothing=config.label_smoothing,
        num_classes=num_classes,
    )
