"""Batches of images on the training device: of data that are kept there, and of pictures read during training."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from linattn.lab.tasks.images import ImageData, ImageFolders
from linattn.lab.train.augment import Augment, to_device
from linattn.lab.train.config import TrainConfig
from linattn.support.extras import need
from linattn.support.machine import cores
from linattn.support.options import OptionError
from linattn.support.seeds import mixed_seed, seed_host, seed_step

# Augmentation is many small operations: a block of several steps takes about as long as one step. This many values,
# counting all channels, are augmented at once; more would only take memory.
BLOCK_VALUES = 2**22
MOST_WORKERS = 16
Mixing = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Batches:
    """Batches on the training device, with normalised images ``(b, C, H, W)`` fp32; subclasses make them.

    ``images`` training images are divided into steps of ``batch_size``, shared evenly by ``processes``. The order of an
    epoch depends only on the seed and the epoch. Step s has the images from place ``s batch_size`` on, of which process
    r has the r-th part, so that a step has the same images for any number of processes. Images at the end that do not
    fill a batch are left out, so that all batches have one shape; they are others in each epoch. A data set smaller
    than a batch is one batch.
    """

    def __init__(
        self, images: int, classes: int, config: TrainConfig, device: torch.device, rank: int, processes: int
    ) -> None:
        if config.batch_size % processes:
            raise OptionError("batch_size", f"must be a multiple of the {processes} processes, got {config.batch_size}")
        self.config, self.device, self.rank, self.processes, self.count = config, device, rank, processes, images
        self.steps_per_epoch = max(1, images // config.batch_size)
        self.share = min(config.batch_size, images) // processes
        """Number of images of a step in this process."""
        self.mixing = create_mixing(config, classes, self.share)

    def indices(self, epoch: int) -> Tensor:
        """Indices of this process's images in an epoch, ``(steps, share)``: one row for each step.

        The order is drawn on the host, so it is the same for every device.
        """
        generator = torch.Generator().manual_seed(mixed_seed("order", self.config.seed, epoch))
        order = torch.randperm(self.count, generator=generator)
        order = order[: self.steps_per_epoch * self.share * self.processes]
        return order.reshape(self.steps_per_epoch, self.processes, self.share)[:, self.rank]

    def test_indices(self, images: int) -> list[list[int]]:
        """Indices of this process's batches of ``images`` test images; all processes together have each image once."""
        mine = list(range(self.rank, images, self.processes))
        return [mine[start : start + self.share] for start in range(0, len(mine), self.share)]

    def train(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and targets of an epoch from ``first_step`` on, the same as those of a whole epoch from there on.

        Targets are weights ``(b, num_classes)`` if images are mixed, else labels ``(b,)`` int64. Global random states
        are seeded before each batch is yielded, from the seed, the epoch, the step and the rank, so that a model draws
        the same in that step of a resumed run.
        """
        for step, batch in enumerate(self.unmixed(epoch, first_step), first_step):
            seed_step(self.config.seed, epoch, step, self.rank)
            yield batch if self.mixing is None else self.mixing(*batch)

    def unmixed(self, epoch: int, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of an epoch."""
        raise NotImplementedError

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Test images and labels ``(b,)``, each once and in order; several processes share them."""
        raise NotImplementedError


class ResidentBatches(Batches):
    """Copies all images to ``device`` once, as uint8, and cuts, augments, normalises and mixes batches there.

    The steps of an epoch are augmented in blocks, whose randomness depends on the seed, the epoch and the block; that
    of mixing depends on the step. An epoch that is entered at a later step therefore has the same batches from there
    on, bit for bit. Nothing waits for the device.
    """

    def __init__(
        self, data: ImageData, config: TrainConfig, device: torch.device, rank: int = 0, processes: int = 1
    ) -> None:
        if config.crop_padding >= min(data.image_size):
            size = "x".join(map(str, data.image_size))
            raise OptionError("crop_padding", f"must be below the size, {size}, got {config.crop_padding}")
        super().__init__(len(data.train), data.num_classes, config, device, rank, processes)
        self.augment = Augment(config, *(value.to(device) for value in data.mean_std()))
        self.images, self.labels = data.train.images.to(device), data.train.labels.to(device)
        self.test_images, self.test_labels = data.test.images.to(device), data.test.labels.to(device)
        self.test_batches = [torch.tensor(i, device=device) for i in self.test_indices(len(data.test))]
        self.steps_per_block = max(1, BLOCK_VALUES // (self.share * data.train.images[0].numel()))

    def unmixed(self, epoch: int, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        size, order = self.steps_per_block, to_device(self.indices(epoch), self.device)
        # A block that is entered in its middle is augmented as a whole, for its draws to be the same.
        for start in range(first_step - first_step % size, self.steps_per_epoch, size):
            indices = order[start : start + size].flatten()
            # Its own generator, so that a block does not depend on what happens between two batches.
            generator = torch.Generator().manual_seed(mixed_seed("augment", self.config.seed, epoch, start, self.rank))
            images = self.augment(self.images[indices], generator).split(self.share)
            block = zip(images, self.labels[indices].split(self.share), strict=True)
            yield from list(block)[max(first_step - start, 0) :]

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in self.test_batches:
            yield self.augment.normalise(self.test_images[chosen]), self.test_labels[chosen]


class FolderBatches(Batches):
    """Batches of pictures that worker processes read and transform with timm. The order and all transforms depend only
    on the seed, the epoch and the picture, so that a resumed epoch continues exactly.

    Training pictures are randomly cropped (8 % to 100 % of the area) and resized, and flipped, RandAugmented and erased
    as the config says. Of test pictures the middle, 7/8 of the shorter side, is taken. All are normalised with the mean
    and standard deviation of ImageNet.

    Batches do not depend on ``workers``, the number of processes that decode; 0: this process does. None: one for each
    core available to this process, at most 16.
    """

    def __init__(
        self,
        data: ImageFolders,
        config: TrainConfig,
        device: torch.device,
        rank: int = 0,
        processes: int = 1,
        workers: int | None = None,
    ) -> None:
        if config.crop_padding:
            raise OptionError("crop_padding", "pictures read while training are cropped and resized at random; use 0")
        need("image folders", "timm", "torchvision")
        from torchvision.datasets import ImageFolder  # type: ignore[import-untyped]

        train, test = ImageFolder(str(data.train_folder), _train_transform(data, config)), test_pictures(data)
        super().__init__(len(train), data.num_classes, config, device, rank, processes)
        workers = min(MOST_WORKERS, max(1, cores() // processes)) if workers is None else workers
        on_gpu = device.type == "cuda"
        options: Any = {"num_workers": workers, "persistent_workers": workers > 0, "pin_memory": on_gpu}
        # (epoch, picture) of each step's batch, changed in place: workers outlive an epoch.
        self.keys: list[list[tuple[int, int]]] = []
        # A loader draws a seed for its workers whenever it starts: from its own generator, not from the global one.
        self.train_loader: DataLoader[Any] = DataLoader(
            _Seeded(train, config.seed), batch_sampler=self.keys, generator=torch.Generator(), **options
        )
        self.test_loader: DataLoader[Any] = DataLoader(
            test, batch_sampler=self.test_indices(len(test)), generator=torch.Generator(), **options
        )

    def unmixed(self, epoch: int, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        steps = self.indices(epoch)[first_step:].tolist()
        self.keys[:] = [[(epoch, index) for index in indices] for indices in steps]
        return self._on_device(self.train_loader)

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._on_device(self.test_loader)

    def _on_device(self, loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in loader:
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)


class _Seeded(Dataset[Any]):
    """Pictures whose transforms are seeded by the epoch and the picture, whatever process runs them."""

    def __init__(self, pictures: Any, seed: int) -> None:
        self.pictures, self.seed = pictures, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        seed_host(mixed_seed("picture", self.seed, epoch, index))
        return self.pictures[index]


def _train_transform(data: ImageFolders, config: TrainConfig) -> Any:
    from timm.data.auto_augment import RandAugment
    from timm.data.transforms_factory import create_transform

    transform: Any = create_transform(
        (data.channels, *data.image_size),
        is_training=True,
        hflip=0.5 if config.flip else 0.0,
        color_jitter=0.0,
        auto_augment=None if config.rand_augment is None else f"rand-{config.rand_augment.removeprefix('rand-')}",
        interpolation="bicubic",
        re_prob=config.erasing,
        re_mode="pixel",
    )
    for part in transform.transforms:
        for operation in part.ops if isinstance(part, RandAugment) else ():
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterize
    return transform


def _posterize(picture: Any, bits: int, **_: Any) -> Any:
    """Posterize; the 0 bits of timm at magnitude 10, which newer PIL refuses, give a black picture as in older PIL."""
    from timm.data.auto_augment import posterize

    return posterize(picture, bits) if bits > 0 else picture.point([0] * 256 * len(picture.getbands()))


def test_pictures(data: ImageFolders) -> Any:
    """The test pictures as a data set of torchvision: the middle of each, 7/8 of the shorter side, normalised."""
    from timm.data.transforms_factory import create_transform
    from torchvision.datasets import ImageFolder

    transform = create_transform((data.channels, *data.image_size), interpolation="bicubic", crop_pct=7 / 8)
    return ImageFolder(str(data.test_folder), transform)


def create_batches(
    data: ImageData | ImageFolders, config: TrainConfig, device: torch.device, *, rank: int = 0, processes: int = 1
) -> Batches:
    """Create the batches of process ``rank`` of ``processes``; raise ``OptionError`` for options that do not fit.

    Example:
        >>> from linattn.lab.tasks import load_images
        >>> batches = create_batches(load_images("digits"), TrainConfig(batch_size=32), torch.device("cpu"))
        >>> images, labels = next(batches.train(epoch=0))
        >>> batches.steps_per_epoch, images.shape, labels.shape
        (44, torch.Size([32, 1, 8, 8]), torch.Size([32]))
    """
    kind: Any = FolderBatches if isinstance(data, ImageFolders) else ResidentBatches
    batches: Batches = kind(data, config, device, rank, processes)
    return batches


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

    mixing: Mixing = Mixup(config.mixup, config.cutmix, label_smoothing=config.label_smoothing, num_classes=num_classes)
    return mixing
