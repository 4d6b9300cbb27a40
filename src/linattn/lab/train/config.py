"""The config of training on images."""

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from linattn.support.checks import check_graphs, check_integer, check_number
from linattn.support.options import OptionError, check_device, check_option

Precision = Literal["fp32", "bf16"]

# Settings of RandAugment in the notation of timm: m9 (magnitude), n2 (operations for an image), mstd0.5, inc1, p0.5.
_RAND_AUGMENT = re.compile(r"(?:(?:m|n|mstd|mmax|p|inc|w)\d+(?:\.\d+)?)(?:-(?:m|n|mstd|mmax|p|inc|w)\d+(?:\.\d+)?)*")
# Fields without effect on the weights: a run may be resumed with other values.
_WITHOUT_EFFECT = ("checkpoint_seconds", "graphs")


@dataclass(frozen=True)
class TrainConfig:
    """How to train on images; the same config and seed on the same kind of device give the same weights.

    Example:
        >>> config = TrainConfig(epochs=5, lr=3e-3)
        >>> config.check()
        >>> TrainConfig(epochs=0).check()
        Traceback (most recent call last):
        linattn.support.options.OptionError: epochs: must be an integer of at least 1, got 0
    """

    epochs: int = 30
    batch_size: int = 128
    """Images of one optimiser step, over all processes together."""
    lr: float = 1e-3
    """Highest learning rate, reached at the end of the warm-up."""
    min_lr: float = 1e-5
    """Learning rate where the cosine ends."""
    warmup_epochs: float = 2
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    clip_norm: float | None = 1.0
    """Largest norm of the gradient of all parameters; larger ones are clipped to it. None: no clipping."""
    label_smoothing: float = 0.1
    energy_loss: float = 0.0
    """Weight in the loss of the share of energy that mechanisms cut off (``mirror`` measures it); 0: off."""
    ema_decay: float | None = None
    """Decay d of an average ``a <- d a + (1 - d) w`` of the weights, which is evaluated and kept; None: off."""
    mixup: float = 0.0
    """Alpha of the Beta distribution of mixing weights; 0: off."""
    cutmix: float = 0.0
    """Alpha of the Beta distribution of areas; 0: off."""
    rand_augment: str | None = None
    """Settings of RandAugment, such as ``m9-n2``; None: off."""
    erasing: float = 0.0
    """Probability that a part of an image is erased."""
    crop_padding: int = 0
    """Pixels by which an image may be shifted in each direction."""
    flip: bool = False
    """Mirror images with probability 1/2; wrong where left and right have a meaning, as in digits."""
    precision: Precision = "fp32"
    """``bf16`` computes in autocast; weights and optimiser stay fp32."""
    compile: bool = False
    graphs: bool | None = False
    """Replay steps as CUDA graphs, which saves the host most of its work; None: where a GPU makes it possible."""
    seed: int = 0
    device: str = "cpu"
    checkpoint_seconds: float = 300.0
    """Longest time between two checkpoints inside an epoch; each epoch ends in one anyway."""

    def check(self) -> None:
        """Raise ``OptionError`` for the first field that makes no sense, before any work is done."""
        for name in ("epochs", "batch_size"):
            check_integer(name, getattr(self, name), 1)
        for name in ("crop_padding", "seed"):
            check_integer(name, getattr(self, name), 0)
        check_number("lr", self.lr, above=0)
        check_number("min_lr", self.min_lr, least=0)
        if self.min_lr > self.lr:
            raise OptionError("min_lr", f"must not exceed lr = {self.lr:g}, got {self.min_lr:g}")
        check_number("warmup_epochs", self.warmup_epochs, least=0)
        if self.warmup_epochs > self.epochs:
            raise OptionError("warmup_epochs", f"must not exceed epochs = {self.epochs}, got {self.warmup_epochs:g}")
        for name in ("weight_decay", "energy_loss", "mixup", "cutmix"):
            check_number(name, getattr(self, name), least=0)
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise OptionError("betas", f"must be two numbers, got {self.betas!r}")
        for beta in self.betas:
            check_number("betas", beta, least=0, below=1)
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, above=0)
        check_number("label_smoothing", self.label_smoothing, least=0, below=1)
        if self.ema_decay is not None:
            check_number("ema_decay", self.ema_decay, above=0, below=1)
        if self.rand_augment is not None and not _RAND_AUGMENT.fullmatch(self.rand_augment):
            raise OptionError("rand_augment", f"must look like m9-n2 or m9-mstd0.5-inc1, got {self.rand_augment!r}")
        check_number("erasing", self.erasing, least=0, most=1)
        check_option("precision", self.precision, get_args(Precision))
        check_number("checkpoint_seconds", self.checkpoint_seconds, above=0)
        check_device(self.device)
        check_graphs(self.graphs, self.device)

    def fingerprint(self) -> dict[str, Any]:
        """What a run must have in common with the one it resumes: all fields that affect the weights.

        Of the device only the kind counts: another GPU can continue a run, but a CPU rounds differently.
        """
        fields = {name: value for name, value in asdict(self).items() if name not in _WITHOUT_EFFECT}
        fields["energy_loss"] = self.energy_loss or None  # runs from before this field do not have it
        return {**fields, "betas": list(self.betas), "device": self.device.split(":")[0]}
