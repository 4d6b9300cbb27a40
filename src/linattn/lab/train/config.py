"""Options of training on images, and recipes: values for those that are not given; and options of mechanisms."""

from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

from linattn.lab.experiment import Machine
from linattn.lab.tasks.load import RESIDENT_BELOW, SOURCES, find_splits
from linattn.lab.train.augment import Policy
from linattn.support.config import Config, option
from linattn.support.options import OptionError, check_graphs, check_option

RECIPES: dict[str, dict[str, Any]] = {
    # For the 1,437 training images of scikit-learn's digits, in a host of size digits with patch_size=2, on a CPU;
    # chosen on held-out training images. The number of steps matters more than that of epochs, hence the small batch.
    # 64 tokens (patch_size=1) need several times as many steps; shifts by a pixel (crop_padding=1) twice as many.
    "digits": {"epochs": 24, "batch_size": 32, "lr": 5e-3, "warmup_epochs": 2.0},
    # For tens of thousands of images of about 32 x 32 on one GPU. flip is off, as left and right have a meaning in
    # digits and letters; turn it on for photographs. Many steps are needed: with a batch of 1,000 and mixup, a softmax
    # model reached only 86 % on Fashion-MNIST after 18 epochs.
    "small_images": {"epochs": 20, "batch_size": 250, "lr": 1e-3, "warmup_epochs": 2.0},
    # DeiT's recipe for ImageNet, as used in the vision papers: 1024 images a step, lr = 5e-4 batch / 512. Three parts
    # are left out: repeated augmentation, ten more epochs at the lowest rate, and batch norms over all processes
    # (NaLaFormer); each process norms its own images.
    "deit": {
        "epochs": 300, "batch_size": 1024, "lr": 1e-3, "warmup_epochs": 5.0, "clip_norm": None,
        "ema_decay": 0.99996 ** (1024 / 512), "mixup": 0.8, "cutmix": 1.0, "rand_augment": "m9-mstd0.5-inc1",
        "erasing": 0.25, "flip": True
    }
}  # fmt: skip
OFF = ("clip_norm", "ema_decay", "rand_augment")  # options that may be None
Precision = Literal["fp32", "bf16"]
_of_machine = partial(option, group="Machine")
_of_training = partial(option, group="Training")
_of_recipe = partial(_of_training, default_text="by recipe")
_rare = partial(_of_training, rare=True)
_of_augmentation = partial(option, group="Augmentation")


@dataclass(frozen=True, kw_only=True)
class Computing(Config):
    """How steps are computed, and how often a run is saved; the same for images and for text."""

    precision: Precision = option(
        "fp32", "Precision of autocast; weights stay fp32.", group="Machine", default_text="bf16 on cuda"
    )
    compile: bool = _of_machine(False, "Compile the blocks.", default_text="on cuda alone")
    graphs: bool | None = _of_machine(
        False, "Replay steps as CUDA graphs, which saves the host most of its work.", affects=False
    )
    checkpoint_seconds: float = _of_machine(
        300.0, "Longest time between two checkpoints; an evaluation ends in one.", above=0, affects=False, rare=True
    )


@dataclass(frozen=True, kw_only=True)
class ImageTraining(Computing, Machine):
    """Data and budget of training on images, without learning rate and seed, which a comparison has many of."""

    data: str = option("digits", f"{SOURCES}.", group="Data")
    image_size: int | None = option(
        None, "Pixels that images in folders are brought to, on a side.", least=1, group="Data"
    )
    recipe: str | None = _of_training(
        None,
        "Values for what is not given.",
        choices=tuple(RECIPES),
        affects=False,
        default_text="digits for digits, deit for folders that are streamed, else small_images",
    )
    epochs: int = _of_recipe(30, "Passes over the training images.", least=1)
    batch_size: int = _of_recipe(128, "Images of a step, over all processes.", least=1)
    min_lr: float = _rare(1e-5, "Learning rate of the last step.", least=0)
    warmup_epochs: float = _of_recipe(2.0, "Epochs in which the learning rate rises.", least=0, rare=True)
    weight_decay: float = _rare(0.05, "Weight decay, on matrices alone.", least=0)
    betas: tuple[float, float] = option((0.9, 0.999), "AdamW's.", least=0, below=1, hidden=True)
    clip_norm: float | None = _rare(1.0, "Gradients longer than this are scaled down; 0: not clipped.", above=0)
    label_smoothing: float = _rare(0.1, "Share of a target spread over all classes.", least=0, below=1)
    energy_loss: float = _rare(0.0, "Weight of a second loss, the share of energy that mirror cuts off.", least=0)
    ema_decay: float | None = _rare(
        None, "Average the weights with this decay, a <- d a + (1 - d) w; 0: do not.", above=0, below=1
    )
    mixup: float = _of_augmentation(0.0, "Alpha of mixup.", least=0, rare=True)
    cutmix: float = _of_augmentation(0.0, "Alpha of cutmix.", least=0, rare=True)
    rand_augment: str | None = _of_augmentation(None, "RandAugment, such as m9-n2.", rare=True)
    erasing: float = _of_augmentation(0.0, "Probability that a part of an image is erased.", least=0, most=1, rare=True)
    crop_padding: int = _of_augmentation(0, "Pixels an image may be shifted by.", least=0)
    flip: bool = _of_augmentation(False, "Mirror half of the images.")

    @classmethod
    def parse(cls, texts: Mapping[str, Any]) -> Self:
        """Fill what is not given from the recipe and the device, and cut the recipe's warm-up to the epochs.

        Example:
            >>> config = TrainConfig.parse({"recipe": "digits", "epochs": "1", "clip_norm": "0"})
            >>> config.epochs, config.lr, config.warmup_epochs, config.clip_norm
            (1, 0.005, 1.0, None)
        """
        given = {name: value for name, value in texts.items() if value is not None or name in OFF}
        name = given.get("recipe") or default_recipe(str(given.get("data", "digits")))
        check_option("recipe", name, RECIPES)
        on_gpu = Machine(device=str(given.get("device") or "")).place().type == "cuda"
        made: dict[str, Any] = {"precision": "bf16" if on_gpu else "fp32", "compile": on_gpu, **RECIPES[name]}
        made |= {"lr": str(made["lr"])} | given | {"recipe": name}
        made |= {off: None for off in OFF if str(made.get(off, "on")) in ("0", "0.0", "", "None")}
        if "warmup_epochs" not in given:
            with suppress(ValueError):  # which the parser words
                made["warmup_epochs"] = min(made["warmup_epochs"], float(made["epochs"]))
        return super().parse(made)

    def check(self) -> None:
        super().check()
        if self.warmup_epochs > self.epochs:
            raise OptionError("warmup_epochs", f"must not exceed epochs = {self.epochs}, got {self.warmup_epochs:g}")
        if self.rand_augment is not None:
            Policy.parse(self.rand_augment)
        if self.graphs:
            check_graphs(self.graphs, self.place().type)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ImageTraining):
    """How to train on images; the same config and seed on the same kind of device give the same weights.

    Example:
        >>> TrainConfig(epochs=5, lr=3e-3).lr
        0.003
        >>> TrainConfig(epochs=0)
        Traceback (most recent call last):
        linattn.support.options.OptionError: epochs: must be at least 1, got 0
    """

    lr: float = _of_recipe(1e-3, "Learning rate at the end of the warm-up, the highest.", above=0)
    seed: int = _of_training(0, "Seed of first weights, order and augmentation.", least=0)

    def check(self) -> None:
        super().check()
        if self.min_lr > self.lr:
            raise OptionError("min_lr", f"must not exceed lr = {self.lr:g}, got {self.min_lr:g}")


def default_recipe(data: str) -> str:
    """The recipe for a source of data, by its name and its size."""
    return "digits" if data == "digits" else "deit" if streamed(data) else "small_images"


def streamed(data: str) -> bool:
    """Whether a source is a folder of so many pictures that they are read while training."""
    folder = Path(data).expanduser()
    if data == "digits" or not folder.is_dir() or find_splits(folder) is None:
        return False
    return len(list(islice(folder.glob("*/*/*"), RESIDENT_BELOW))) == RESIDENT_BELOW


def options_of(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of mechanism ``name`` among those given as ``key=value``, for all, and ``name.key=value``, for one.

    Example:
        >>> options_of("pola", {"pola.alpha": 4, "mirror.modulation": "none", "gate": "head"})
        {'alpha': 4, 'gate': 'head'}
    """
    parts = [(*key.rpartition("."), value) for key, value in options.items()]
    return {key: value for owner, _, key, value in parts if owner in ("", name)}


def check_owners(options: Mapping[str, Any], names: Container[str]) -> None:
    """Raise for an option of a mechanism that is not one of ``names``."""
    for key in options:
        owner = key.rpartition(".")[0]
        if owner and owner not in names:
            raise OptionError("option", f"{key} is given, but {owner} is not compared")


def option_or(other: str, error: Exception, name: str, own: Mapping[str, Any]) -> OptionError:
    """Turn an ``error`` in creating a host with mechanism ``name`` into one of a command line option.

    The option is ``--option`` where the error is about one of the mechanism's ``own`` options, else ``other``.
    """
    message = str(error)
    if message.replace("=", " ").split(" ", 1)[0] in own or "has no option" in message or "must not hold" in message:
        return OptionError("option", f"{name}: {message}")
    return OptionError(other, f"{name} does not fit this host: {message}")
