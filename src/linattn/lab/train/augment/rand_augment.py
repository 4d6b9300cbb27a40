"""RandAugment for batches: every image draws its own operations. Operations, odds and strengths are timm's."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.lab.train.augment import pixels
from linattn.lab.train.augment.pixels import to_device, uniform
from linattn.support.options import OptionError

ALLOWED = (
    "m (magnitude 0..10), n (operations an image), p (probability of each), mstd (spread of the magnitude, above 100: "
    "uniform), mmax (greatest magnitude), inc (0 or 1: stronger with the magnitude), joined by dashes, as in "
    "m9-n2-mstd0.5-inc1"
)
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(pixels, name) for name in ("auto_contrast", "equalize", "invert")
}
# The parameter of an operation at strength ``x`` with the sign ``s``, and the same where it grows with the magnitude.
Parameter = Callable[[Tensor, Tensor], Tensor]
BLEND: tuple[Parameter, Parameter] = (lambda x, s: 0.1 + 1.8 * x, lambda x, s: (1 + 0.9 * x * s).clamp_min(0.1))
PARAMETERS: dict[str, tuple[Parameter, Parameter]] = {
    "posterize": (lambda x, s: (4 * x).floor(), lambda x, s: (4 - (4 * x).floor()).clamp_min(0)),  # bits that stay
    "solarize": (  # threshold
        lambda x, s: (256 * x).floor().clamp_max(256), lambda x, s: 256 - (256 * x).floor().clamp_max(256)
    ),
    "solarize_add": (lambda x, s: (110 * x).floor().clamp_max(128),) * 2,
    **dict.fromkeys(("color", "contrast", "brightness", "sharpness"), BLEND),  # 1 changes nothing
    "rotate": (lambda x, s: 30 * x * s,) * 2,  # degrees
    "shear_x": (lambda x, s: 0.3 * x * s,) * 2,
    "shear_y": (lambda x, s: 0.3 * x * s,) * 2,
    "translate_x": (lambda x, s: 0.45 * x * s,) * 2,  # share of the image
    "translate_y": (lambda x, s: 0.45 * x * s,) * 2,
}  # fmt: skip
GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
OPERATIONS = (*PLAIN, *PARAMETERS)


@dataclass(frozen=True)
class Policy:
    """Settings in the notation of timm, such as ``rand-m9-n2-mstd0.5-inc1``, with timm's defaults.

    Example:
        >>> Policy.parse("m9-mstd0.5-inc1")
        Policy(m=9, n=2, p=0.5, mstd=0.5, mmax=10, inc=1)
    """

    m: int = 10
    """Magnitude."""
    n: int = 2
    """Operations an image."""
    p: float = 0.5
    """Probability of each."""
    mstd: float = 0.0
    """Spread of the magnitude; above 100: uniform."""
    mmax: int = 10
    """Greatest magnitude."""
    inc: int = 0
    """Whether all operations grow with the magnitude."""

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Parse settings; the ``rand-`` at the beginning, as timm has it, is optional."""
        kinds = {field.name: field.type for field in fields(cls)}
        given: dict[str, float] = {}
        for part in text.removeprefix("rand-").split("-"):
            match = re.fullmatch(r"(mstd|mmax|inc|m|n|p)(\d+(?:\.\d+)?)", part)
            if match is None or match[1] in given or (kinds[match[1]] in (int, "int") and "." in match[2]):
                raise OptionError("rand_augment", f"cannot read {part!r} in {text!r}; allowed once each: {ALLOWED}")
            given[match[1]] = float(match[2]) if kinds[match[1]] in (float, "float") else int(match[2])
        policy = cls(**given)  # type: ignore[arg-type]
        wrong = {
            f"m must be at most {policy.mmax} (mmax)": policy.m > policy.mmax,
            "n must be at least 1": policy.n < 1,
            "p must be at most 1": policy.p > 1,
            "mmax must be at least 1": policy.mmax < 1,
            "inc must be 0 or 1": policy.inc > 1,
        }
        for rule, broken in wrong.items():
            if broken:
                raise OptionError("rand_augment", f"{rule}, got {text!r}")
        return policy

    def levels(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw strengths ``(count,)``, fp64; magnitude 10 is a strength of 1."""
        spread = self.mstd > 100
        noise = (torch.rand if spread else torch.randn)(count, generator=generator, dtype=torch.float64)
        magnitude = self.m * noise if spread else self.m + self.mstd * noise
        return magnitude.clamp(0, self.mmax) / 10

    def argument(self, operation: str, level: Tensor, sign: Tensor) -> Tensor:
        """The parameter of ``operation`` at strength ``level (b,)``, fp64; ``sign (b,)``: the direction, if any."""
        return PARAMETERS[operation][self.inc](level, sign)


class RandAugment:
    """Apply ``policy.n`` operations to each of ``images (b, C, H, W)`` uint8, drawn with replacement for each.

    Resampling is always bilinear, and all geometric operations are done in one.

    Args:
        policy: a ``Policy``.
        fill: ``(C,)`` on the device of the images, 0..255: the value of pixels from outside an image.

    Paper: Cubuk et al., RandAugment (arXiv:1909.13719).

    Example:
        >>> augment = RandAugment(Policy.parse("m9-n2-mstd0.5-inc1"), torch.zeros(1))
        >>> images = torch.zeros(5, 1, 8, 8, dtype=torch.uint8)
        >>> augment(images, torch.Generator().manual_seed(0)).shape
        torch.Size([5, 1, 8, 8])
    """

    def __init__(self, policy: Policy, fill: Tensor) -> None:
        self.policy, self.fill = policy, fill

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        for _ in range(self.policy.n):
            images = self._once(images, generator)
        return images

    def _once(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Apply one operation to each image. The host draws them, so it can group images without asking the device."""
        count = len(images)
        chosen = torch.randint(len(OPERATIONS), (count,), generator=generator)
        chosen[uniform(count, generator) >= self.policy.p] = -1
        level = self.policy.levels(count, generator)
        sign = torch.where(uniform(count, generator) < 0.5, -1.0, 1.0)
        images = images.clone()
        for index, changed in self._groups(images, chosen, level, sign):
            images.index_copy_(0, index, changed)
        return images

    def _groups(self, images: Tensor, chosen: Tensor, level: Tensor, sign: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Indices on the device and the resulting images: one group for each operation, and one for all resampling."""
        height, width = images.shape[2:]
        resampled, moved = [], []
        for number, name in enumerate(OPERATIONS):
            members = (chosen == number).nonzero()[:, 0]
            if not len(members) or (name == "color" and images.shape[1] == 1):
                continue
            if name in PLAIN:
                index = to_device(members, images.device)
                yield index, PLAIN[name](images[index])
                continue
            parameter = self.policy.argument(name, level[members], sign[members])
            if name in GEOMETRIC:
                resampled.append(members)
                moved.append(matrices(name, parameter, height, width))
                continue
            index = to_device(members, images.device)
            yield index, getattr(pixels, name)(images[index], parameter)
        if resampled:
            index = to_device(torch.cat(resampled), images.device)
            yield index, affine(images[index], torch.cat(moved), self.fill)


def matrices(operation: str, factor: Tensor, height: int, width: int) -> Tensor:
    """Matrices ``(b, 2, 3)`` of a geometric operation with ``factor (b,)``, for :func:`affine`.

    A shear moves each row (column) by ``factor`` times its distance from the top (left); a translation fetches each
    pixel from that share of the width (height) further right (down); a rotation is counter-clockwise about the centre,
    in degrees.
    """
    angle = -torch.deg2rad(factor)
    cos, sin, x, y = angle.cos(), angle.sin(), width / 2, height / 2
    entries = {
        "shear_x": {"b": factor},
        "shear_y": {"d": factor},
        "translate_x": {"c": factor * width},
        "translate_y": {"f": factor * height},
        "rotate": {"a": cos, "b": sin, "c": x - cos * x - sin * y, "d": -sin, "e": cos, "f": y + sin * x - cos * y},
    }[operation]
    one, zero = torch.ones_like(factor), torch.zeros_like(factor)
    entries = {"a": one, "b": zero, "c": zero, "d": zero, "e": one, "f": zero} | entries
    return torch.stack([entries[name] for name in "abcdef"], 1).reshape(-1, 2, 3)


def affine(images: Tensor, matrices: Tensor, fill: Tensor) -> Tensor:
    """``out(x, y) = in(a x + b y + c, d x + e y + f)``, bilinear; ``((a, b, c), (d, e, f))`` is the matrix of an image.

    x and y are in pixels from the upper left corner of the image, with pixel centres at halves, as in PIL. Pixels from
    outside the image are ``fill``.

    Args:
        images: ``(b, C, H, W)`` uint8.
        matrices: ``(b, 2, 3)`` on the host.
        fill: ``(C,)`` on the device of the images, 0..255.

    Example:
        >>> image = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)[None, None]
        >>> to_the_left = torch.tensor([[[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]])
        >>> affine(image, to_the_left, torch.zeros(1))[0, 0].tolist()
        [[2, 0], [4, 0]]
    """
    height, width = images.shape[2:]
    device = images.device
    matrix = to_device(matrices.float(), device)[:, :, :, None, None]  # (b, 2, 3, 1, 1)
    x = torch.arange(width, device=device) + 0.5
    y = (torch.arange(height, device=device) + 0.5)[:, None]
    from_x, from_y = (matrix[:, :, 0] * x + matrix[:, :, 1] * y + matrix[:, :, 2]).unbind(1)  # (b, H, W) each
    grid = torch.stack((from_x * (2 / width) - 1, from_y * (2 / height) - 1), -1)
    sampled = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    outside = (from_x < 0) | (from_x >= width) | (from_y < 0) | (from_y >= height)
    return torch.where(outside[:, None], fill[:, None, None], sampled).round().to(torch.uint8)
