"""Augmentation of whole batches on the training device, with separate parameters for every image.

Other libraries augment one picture at a time on the CPU, which cannot feed a fast device. This one draws parameters on
the host, so that images can be grouped by operation without waiting for the device, and pixels never leave the device.
Operations, odds and strengths are timm's, and the arithmetic is PIL's, but for resampling to the last bit. Images are
``(b, C, H, W)`` uint8.
"""

from math import log
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.support.options import OptionError

AREA = (0.02, 1 / 3)  # smallest and largest share of an image that is erased
ASPECT = 0.3  # its height over its width lies between this and the inverse
ATTEMPTS = 10  # how often a rectangle that does not fit is drawn, before it is given up
POLICY = (
    "m (magnitude, 0..mmax), n (operations an image, from 1), p (probability of each, 0..1), mstd (spread of the "
    "magnitude, above 100: uniform), mmax (greatest magnitude), inc (0 or 1: stronger with the magnitude), joined by "
    "dashes, as in m9-n2-mstd0.5-inc1"
)


class Policy(NamedTuple):
    """Settings of RandAugment in the notation of timm, such as ``rand-m9-n2-mstd0.5-inc1``, with timm's defaults.

    Example:
        >>> Policy.parse("m9-mstd0.5-inc1")
        Policy(m=9, n=2, p=0.5, mstd=0.5, mmax=10, inc=1)
    """

    m: int = 10
    n: int = 2
    p: float = 0.5
    mstd: float = 0.0
    mmax: int = 10
    inc: int = 0

    @classmethod
    def parse(cls, text: str) -> "Policy":
        given: dict[str, Any] = {}
        try:
            for part in text.removeprefix("rand-").split("-"):
                name = part.rstrip("0123456789.")
                given[name] = type(cls._field_defaults[name])(part[len(name) :])
            policy = cls(**given)
        except (KeyError, ValueError):
            policy = cls(n=0)
        if policy.m > policy.mmax or policy.n < 1 or policy.p > 1 or policy.inc > 1:
            raise OptionError("rand_augment", f"must be made of {POLICY}, got {text!r}")
        return policy

    def levels(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw strengths ``(count,)``, fp64; magnitude 10 is a strength of 1."""
        if self.mstd > 100:
            magnitude = self.m * uniform(count, generator)
        else:
            magnitude = self.m + self.mstd * torch.randn(count, generator=generator, dtype=torch.float64)
        return magnitude.clamp(0, self.mmax) / 10


class Augment:
    """Crop, flip, RandAugment, normalise, erase, in this order, as far as the config asks for them.

    Args:
        config: which operations to apply, and how strongly: an ``ImageTraining``.
        mean, std: ``(C,)``, of pixels in [0, 1], on the device of the images. The std of a constant channel would be a
            division by 0: it is taken as one step of 256.
    """

    def __init__(self, config: Any, mean: Tensor, std: Tensor) -> None:
        self.config = config
        # Pixels are 0..255 from here on, so mean and std must be too.
        self.mean = (mean * 255).float()[:, None, None]
        self.std = (std * 255).clamp_min(1).float()[:, None, None]
        self.fill = (mean * 255).round().float()

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Augment images to fp32, for training; ``generator``, on the host, is the only randomness."""
        if self.config.crop_padding:
            images = random_crop(images, self.config.crop_padding, generator)
        if self.config.flip:
            mirrored = to_device(torch.rand(len(images), generator=generator) < 0.5, images.device)
            images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
        if self.config.rand_augment is not None:
            images = rand_augment(images, Policy.parse(self.config.rand_augment), self.fill, generator)
        normalised = self.normalise(images)
        if self.config.erasing:
            normalised = random_erasing(normalised, self.config.erasing, generator)
        return normalised

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise images, for testing: each channel has mean 0 and variance 1 over the training images."""
        return (images - self.mean) / self.std


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor to ``device`` without waiting for the device."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


def uniform(count: int, generator: torch.Generator) -> Tensor:
    """``count`` numbers in [0, 1), fp64."""
    return torch.rand(count, generator=generator, dtype=torch.float64)


def random_crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Pad images with zeros on all sides and crop each to its size, at a random place."""
    count, _, height, width = images.shape
    top, left = to_device(torch.randint(2 * padding + 1, (2, count), generator=generator), images.device)
    # A view of the windows at all places: only the windows that are taken are copied.
    windows = F.pad(images, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(count, device=images.device), :, top, left]


def random_erasing(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Erase a part of each of the normalised ``images`` with ``probability``, by noise ``N(0, 1)``.

    The area is uniform in 2 % to 33 % of the image, the logarithm of the aspect ratio uniform in ``log 0.3 .. -log
    0.3``, the place uniform, all drawn for each image separately.

    Paper: Zhong et al., Random Erasing Data Augmentation (arXiv:1708.04896), with the sizes and the noise of timm.
    """
    (count, _, height, width), device = images.shape, images.device
    hit = uniform(count, generator) < probability
    area = uniform(count * ATTEMPTS, generator).reshape(count, ATTEMPTS)
    area = (AREA[0] + (AREA[1] - AREA[0]) * area) * (height * width)
    ratio = (uniform(count * ATTEMPTS, generator).reshape(count, ATTEMPTS) * 2 - 1).mul(log(ASPECT)).exp()
    down, across = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (down < height) & (across < width)
    first = fits.to(torch.uint8).argmax(1, keepdim=True)
    down, across = down.gather(1, first)[:, 0], across.gather(1, first)[:, 0]
    top = (uniform(count, generator) * (height - down + 1)).floor()
    left = (uniform(count, generator) * (width - across + 1)).floor()
    noise_seed = int(torch.randint(2**62, (), generator=generator))  # on the host, so that nothing waits
    erased = (hit & fits.any(1)).nonzero()[:, 0]
    index = to_device(erased, device)
    top, left, down, across = to_device(torch.stack((top, left, down, across))[:, erased, None], device)
    row, column = torch.arange(height, device=device), torch.arange(width, device=device)
    rows = (row >= top) & (row < top + down)
    columns = (column >= left) & (column < left + across)
    chosen, on_device = images[index], torch.Generator(device).manual_seed(noise_seed)
    noise = torch.randn(chosen.shape, generator=on_device, device=device, dtype=images.dtype)
    inside = (rows[:, :, None] & columns[:, None, :])[:, None]
    return images.index_copy(0, index, torch.where(inside, noise, chosen))


def rand_augment(images: Tensor, policy: Policy, fill: Tensor, generator: torch.Generator) -> Tensor:
    """Apply ``policy.n`` operations to each image, drawn with replacement for each.

    Resampling is always bilinear, and done for all geometric operations at once; ``fill (C,)``, on the device of the
    images, is the value of pixels from outside an image.

    Paper: Cubuk et al., RandAugment (arXiv:1909.13719).
    """
    for _ in range(policy.n):
        chosen = torch.randint(len(OPERATIONS), (len(images),), generator=generator)
        chosen[uniform(len(images), generator) >= policy.p] = -1
        level = policy.levels(len(images), generator)
        sign = torch.where(uniform(len(images), generator) < 0.5, -1.0, 1.0)
        changed, moved, moves = images.clone(), [], []
        for number, name in enumerate(OPERATIONS):
            members = (chosen == number).nonzero()[:, 0]
            parameter = parameter_of(name, level[members], sign[members], policy.inc)
            if name in GEOMETRIC:
                moved.append(members)
                moves.append(matrices(name, parameter, *images.shape[2:]))
            elif len(members):
                index = to_device(members, images.device)
                changed.index_copy_(0, index, change(name, images[index], to_device(parameter.float(), images.device)))
        index = to_device(torch.cat(moved), images.device)
        images = changed.index_copy_(0, index, affine(images[index], torch.cat(moves), fill))
    return images


def parameter_of(operation: str, x: Tensor, sign: Tensor, inc: int) -> Tensor:
    """The parameter of ``operation`` at strengths ``x (b,)``; with ``inc`` it grows with the magnitude."""
    if operation in BLENDS:  # factors, of which 1 changes nothing
        return (1 + 0.9 * x * sign).clamp_min(0.1) if inc else 0.1 + 1.8 * x
    if operation == "posterize":  # bits that stay
        return (4 - (4 * x).floor()).clamp_min(0) if inc else (4 * x).floor()
    if operation == "solarize":  # threshold
        threshold = (256 * x).floor().clamp_max(256)
        return 256 - threshold if inc else threshold
    if operation == "solarize_add":
        return (110 * x).floor().clamp_max(128)
    return GEOMETRIC.get(operation, 0.0) * x * sign


def matrices(operation: str, factor: Tensor, height: int, width: int) -> Tensor:
    """Matrices ``(b, 2, 3)`` of a geometric operation with ``factor (b,)``, for :func:`affine`.

    A shear moves each row (column) by ``factor`` times its distance from the top (left); a translation fetches each
    pixel from that share of the width (height) further right (down); a rotation is counter-clockwise about the centre,
    in degrees.
    """
    one, zero, x, y = torch.ones_like(factor), torch.zeros_like(factor), width / 2, height / 2
    cos, sin = torch.deg2rad(-factor).cos(), torch.deg2rad(-factor).sin()
    entries = {
        "shear_x": (one, factor, zero, zero, one, zero),
        "shear_y": (one, zero, zero, factor, one, zero),
        "translate_x": (one, zero, factor * width, zero, one, zero),
        "translate_y": (one, zero, zero, zero, one, factor * height),
        "rotate": (cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y),
    }
    return torch.stack(entries[operation], 1).reshape(-1, 2, 3)


def affine(images: Tensor, matrices: Tensor, fill: Tensor) -> Tensor:
    """``out(x, y) = in(a x + b y + c, d x + e y + f)``, bilinear; ``((a, b, c), (d, e, f))`` is the matrix of an image.

    x and y are in pixels from the upper left corner of the image, with pixel centres at halves, as in PIL. Pixels from
    outside the image are ``fill (C,)``, 0..255, on the device of the images; ``matrices (b, 2, 3)`` are on the host.

    Example:
        >>> image = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)[None, None]
        >>> to_the_left = torch.tensor([[[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]])
        >>> affine(image, to_the_left, torch.zeros(1))[0, 0].tolist()
        [[2, 0], [4, 0]]
    """
    (height, width), device = images.shape[2:], images.device
    matrix = to_device(matrices.float(), device)[:, :, :, None, None]  # (b, 2, 3, 1, 1)
    x = torch.arange(width, device=device) + 0.5
    y = (torch.arange(height, device=device) + 0.5)[:, None]
    from_x, from_y = (matrix[:, :, 0] * x + matrix[:, :, 1] * y + matrix[:, :, 2]).unbind(1)  # (b, H, W) each
    grid = torch.stack((from_x * (2 / width) - 1, from_y * (2 / height) - 1), -1)
    sampled = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    outside = (from_x < 0) | (from_x >= width) | (from_y < 0) | (from_y >= height)
    return torch.where(outside[:, None], fill[:, None, None], sampled).round().to(torch.uint8)


def change(operation: str, images: Tensor, parameter: Tensor) -> Tensor:
    """Change the values of pixels; ``parameter (b,)`` fp32 is on the device."""
    parameter = parameter[:, None, None, None]
    if operation in PIXELS:
        return PIXELS[operation](images, parameter)
    start = BLENDS[operation](images)
    return (start + parameter * (images - start)).clamp_(0, 255).to(torch.uint8)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep only the ``bits`` highest bits of each pixel; with 0 the image is black."""
    dropped = (8 - bits.int()).clamp(0, 8)
    return ((images.int() >> dropped) << dropped).to(torch.uint8)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert pixels of at least ``threshold``."""
    return torch.where(images < threshold, images, 255 - images)


def solarize_add(images: Tensor, added: Tensor) -> Tensor:
    """Add ``added`` to pixels below 128."""
    brighter = (images.int() + added.int()).clamp_max(255).to(torch.uint8)
    return torch.where(images < 128, brighter, images)


def auto_contrast(images: Tensor, _: Tensor) -> Tensor:
    """Stretch the values of each channel, so that the darkest becomes 0 and the lightest 255."""
    low, high = (bound.double() for bound in images.flatten(2).aminmax(dim=2, keepdim=True))
    # A tensor over a tensor: a number over a tensor uses the reciprocal, and its last bit is not that of PIL.
    scale = torch.full_like(high, 255) / (high - low)
    # In a channel of one value this would divide by zero: such a channel stays as it is.
    scale, offset = (torch.where(high > low, a, b) for a, b in ((scale, 1.0), (-low * scale, 0.0)))
    stretched = images.flatten(2).double() * scale + offset
    return stretched.clamp_(0, 255).to(torch.uint8).reshape(images.shape)


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """Spread values so that all ranges of values occur about equally often.

    With ``n_i`` pixels of value i, ``m`` the greatest value and ``step = floor((pixels - n_m) / 255)``, value i becomes
    ``floor((floor(step / 2) + sum_{j < i} n_j) / step)``. If ``step`` is 0, the channel stays as it is.
    """
    values = images.flatten(2).flatten(0, 1).long()
    occurs = torch.zeros(len(values), 256, dtype=torch.int64, device=images.device)
    occurs = occurs.scatter_add(1, values, torch.ones_like(values))
    step = (values.shape[1] - occurs.gather(1, values.amax(1, keepdim=True))).div(255, rounding_mode="floor")
    below = occurs.cumsum(1) - occurs
    spread = (step // 2 + below).div(step.clamp_min(1), rounding_mode="floor").clamp_max(255)
    table = torch.where(step > 0, spread, torch.arange(256, device=images.device))
    return table.gather(1, values).to(torch.uint8).reshape(images.shape)


def grey(images: Tensor) -> Tensor:
    """The grey image ``(b, 1, H, W)`` fp32: ITU-R 601 luma in 16-bit arithmetic; a single channel stays as it is."""
    if images.shape[1] == 1:
        return images.float()
    red, green, blue = images.int().unbind(1)
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16)[:, None].float()


def mean_grey(images: Tensor) -> Tensor:
    return (grey(images).double().mean((1, 2, 3), keepdim=True) + 0.5).floor().float()


def smooth(images: Tensor) -> Tensor:
    """The image smoothed by ``((1, 1, 1), (1, 5, 1), (1, 1, 1)) / 13``, but for its rim."""
    values = images.float()
    # A box plus four times its middle: a kernel with a 5 would have to be copied to the device.
    total = F.avg_pool2d(values, 3, stride=1, divisor_override=1) + 4 * values[:, :, 1:-1, 1:-1]
    smoothed = values.clone()
    # Sums are whole numbers below 2^24, exact in fp32; a 13th is never halfway between two, so this rounds to nearest.
    smoothed[:, :, 1:-1, 1:-1] = (total.round() / 13 + 0.5).floor()
    return smoothed


PIXELS = {
    "auto_contrast": auto_contrast, "equalize": equalize, "invert": solarize,  # from 0 on
    "posterize": posterize, "solarize": solarize, "solarize_add": solarize_add
}  # fmt: skip
# What images are blended with.
BLENDS = {"color": grey, "contrast": mean_grey, "brightness": lambda images: 0 * images.float(), "sharpness": smooth}
# Greatest degrees, slopes and shares of the image.
GEOMETRIC = {"rotate": 30.0, "shear_x": 0.3, "shear_y": 0.3, "translate_x": 0.45, "translate_y": 0.45}
OPERATIONS = (*PIXELS, *BLENDS, *GEOMETRIC)
