"""RandAugment for batches: every image draws its own operations."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from linattn.lab.train.augment import histogram, photometric
from linattn.lab.train.augment.affine import affine, rotate, shear_x, shear_y, translate_x, translate_y
from linattn.lab.train.augment.host import to_device, uniform
from linattn.lab.train.augment.policy import Policy

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "auto_contrast": histogram.auto_contrast,
    "equalize": histogram.equalize,
    "invert": photometric.invert,
}
WITH_PARAMETER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "posterize": photometric.posterize,
    "solarize": photometric.solarize,
    "solarize_add": photometric.solarize_add,
    "color": photometric.color,
    "contrast": photometric.contrast,
    "brightness": photometric.brightness,
    "sharpness": photometric.sharpness,
}
# Parameter, height and width -> matrices. All five operations are done in one resampling.
MATRICES: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "rotate": rotate,
    "shear_x": lambda factor, height, width: shear_x(factor),
    "shear_y": lambda factor, height, width: shear_y(factor),
    "translate_x": lambda share, height, width: translate_x(share, width),
    "translate_y": lambda share, height, width: translate_y(share, height),
}
OPERATIONS = (*PLAIN, *WITH_PARAMETER, *MATRICES)


class RandAugment:
    """Apply ``policy.operations`` operations to each of ``images (b, C, H, W)`` uint8, drawn with replacement for each.

    The operations, their odds and strengths are timm's; resampling is always bilinear.

    Args:
        policy: a ``Policy``.
        fill: ``(C,)`` on the device of the images, 0..255: the value of pixels from outside an image.

    Paper: Cubuk et al., RandAugment (arXiv:1909.13719).

    Example:
        >>> import torch
        >>> augment = RandAugment(Policy.parse("m9-n2-mstd0.5-inc1"), torch.zeros(1))
        >>> images = torch.zeros(5, 1, 8, 8, dtype=torch.uint8)
        >>> augment(images, torch.Generator().manual_seed(0)).shape
        torch.Size([5, 1, 8, 8])
    """

    def __init__(self, policy: Policy, fill: Tensor) -> None:
        self.policy, self.fill = policy, fill

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        for _ in range(self.policy.operations):
            images = self._once(images, generator)
        return images

    def _once(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Apply one operation to each image. The host draws them, so it can group images without asking the device."""
        count = len(images)
        chosen = torch.randint(len(OPERATIONS), (count,), generator=generator)
        chosen[uniform(count, generator) >= self.policy.probability] = -1
        level = self.policy.levels(count, generator)
        sign = torch.where(uniform(count, generator) < 0.5, -1.0, 1.0)
        images = images.clone()
        for index, changed in self._groups(images, chosen, level, sign):
            images.index_copy_(0, index, changed)
        return images

    def _groups(self, images: Tensor, chosen: Tensor, level: Tensor, sign: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Indices on the device and the resulting images: one group for each operation, and one for all resampling."""
        height, width = images.shape[2:]
        resampled, matrices = [], []
        for number, name in enumerate(OPERATIONS):
            members = (chosen == number).nonzero()[:, 0]
            if not len(members) or (name == "color" and images.shape[1] == 1):
                continue
            if name in MATRICES:
                parameter = self.policy.argument(name, level[members], sign[members])
                resampled.append(members)
                matrices.append(MATRICES[name](parameter, height, width))
                continue
            index = to_device(members, images.device)
            if name in PLAIN:
                yield index, PLAIN[name](images[index])
            else:
                parameter = self.policy.argument(name, level[members], sign[members])
                yield index, WITH_PARAMETER[name](images[index], parameter)
        if resampled:
            index = to_device(torch.cat(resampled), images.device)
            yield index, affine(images[index], torch.cat(matrices), self.fill)
