"""Batches of pictures that are read and decoded during training."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from linattn.lab.tasks.images import ImageFolders
from linattn.lab.train.batches import Shares, create_mixing
from linattn.lab.train.config import TrainConfig
from linattn.support.extras import need
from linattn.support.machine import cores
from linattn.support.options import OptionError
from linattn.support.seeds import mixed_seed, seed_host, seed_step

MOST_WORKERS = 16


class FolderBatches:
    """Batches of pictures that worker processes read and transform with timm. The order and all transforms depend only
    on the seed, the epoch and the picture, so that a resumed epoch continues exactly.

    Training pictures are randomly cropped (8 % to 100 % of the area) and resized, and flipped, RandAugmented and erased
    as the config says. Of test pictures the middle, 7/8 of the shorter side, is taken. All are normalised with the mean
    and standard deviation of ImageNet.

    Args:
        data, config, device, rank, processes: as for ``create_batches``.
        workers: number of processes that decode; 0: this process does. None: one for each core available to this
            process, at most 16. Batches do not depend on it.
    """

    def __init__(
        self,
        data: ImageFolders,
        config: TrainConfig,
        device: torch.device,
        *,
        rank: int = 0,
        processes: int = 1,
        workers: int | None = None,
    ) -> None:
        if config.crop_padding:
            raise OptionError("crop_padding", "pictures read while training are cropped and resized at random; use 0")
        need("image folders", "timm", "torchvision")
        from torchvision.datasets import ImageFolder  # type: ignore[import-untyped]

        self.config, self.device, self.rank = config, device, rank
        train = ImageFolder(str(data.train_folder), _train_transform(data, config))
        test = test_pictures(data)
        self.shares = Shares(len(train), config.batch_size, processes, rank, config.seed)
        self.steps_per_epoch = self.shares.steps
        self.mixing = create_mixing(config, data.num_classes, self.shares.share)
        workers = min(MOST_WORKERS, max(1, cores() // processes)) if workers is None else workers
        options: dict[str, Any] = {
            "num_workers": workers,
            "persistent_workers": workers > 0,
            "pin_memory": device.type == "cuda",
        }
        self.sampler = _Steps(self.shares)
        # A loader draws a seed for its workers whenever it starts: from its own generator, not from the global one.
        self.train_loader: DataLoader[Any] = DataLoader(
            _Seeded(train, config.seed), batch_sampler=self.sampler, generator=torch.Generator(), **options
        )
        self.test_loader: DataLoader[Any] = DataLoader(
            test, batch_sampler=self.shares.test_indices(len(test)), generator=torch.Generator(), **options
        )

    def train(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        self.shares.check_step(first_step)
        self.sampler.epoch, self.sampler.first_step = epoch, first_step
        for step, (pictures, targets) in enumerate(self.train_loader, first_step):
            images, labels = self._to_device(pictures), self._to_device(targets)
            seed_step(self.config.seed, epoch, step, self.rank)
            yield (images, labels) if self.mixing is None else self.mixing(images, labels)

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self.test_loader:
            yield self._to_device(images), self._to_device(labels)

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


class _Steps(Sampler[list[tuple[int, int]]]):
    """The (epoch, picture) pairs of each step's batch; workers outlive an epoch, so pairs tell them the epoch."""

    def __init__(self, shares: Shares) -> None:
        self.shares, self.epoch, self.first_step = shares, 0, 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for indices in self.shares.indices(self.epoch)[self.first_step :].tolist():
            yield [(self.epoch, index) for index in indices]


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
