"""Augmentation of whole batches on the training device, with separate parameters for every image.

Other libraries augment one picture at a time on the CPU, which cannot feed a fast device. This one draws parameters on
the host, so that images can be grouped by operation without waiting for the device, and pixels never leave the device.
Results are those of timm's transforms, with which the tests compare.
"""

from linattn.lab.train.augment.pipeline import Augment

__all__ = ["Augment"]
