"""Augmentation of whole batches on the device they are trained on, with parameters of its own for every image.

Libraries augment one picture at a time on the CPU, which cannot feed a fast device. Here parameters are drawn on the
host, so that images can be grouped by what happens to them without waiting for the device, and pixels never leave it.
Results are those of timm's transforms, which the tests compare with.
"""

from linattn.train.augment.pipeline import Augment

__all__ = ["Augment"]
