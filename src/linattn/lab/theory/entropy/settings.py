"""The settings of the experiment, in one frozen value."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn.mechanisms.registry import list_mechanisms
from linattn.models.vision import SIZES
from linattn.support.options import OptionError, check_device, check_option

SCALES = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
HOSTS = ("softmax", "relu", "pola", "nala", "mirror")


@dataclass(frozen=True)
class EntropyConfig:
    """Sizes of the random activations, where the real ones come from, and the factors of all queries.

    Attributes:
        mechanisms: measured on the random activations, and on those of the first host; empty: all that are registered.
        scales: factors of the queries, 1 among them.
        batch, heads, head_dim, tokens: sizes of random activations; ``tokens`` is also the length of texts.
        hosts: mechanisms with which a vision transformer is trained, each measured as it is after training; all
            mechanisms are also measured on the activations of the first host. Empty: random activations alone.
        data, size, patch_size, epochs, images: of these hosts; ``images`` are examined after training.
        checkpoint: a folder instead of training: ``weights.pt`` of a run of ``linattn train`` with the first host and
            the same data, size and patch size, or a language model that transformers can load, which reads ``text``.
        text: a text file.
    """

    mechanisms: tuple[str, ...] = ()
    scales: tuple[float, ...] = SCALES
    batch: int = 2
    heads: int = 4
    head_dim: int = 32
    tokens: int = 64
    hosts: tuple[str, ...] = HOSTS
    data: str = "digits"
    size: str = "digits"
    patch_size: int = 2
    epochs: int = 10
    images: int = 32
    checkpoint: Path | None = None
    text: Path | None = None
    device: str = "cpu"
    seed: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return self.mechanisms or tuple(list_mechanisms())

    def check(self) -> None:
        """Raise OptionError that names the option and what is allowed."""
        check_device(self.device)
        for option in ("mechanisms", "hosts"):
            for name in getattr(self, option):
                allowed = list_mechanisms(bidirectional=True) if option == "hosts" else list_mechanisms()
                check_option(option, name, allowed)
        for option in ("batch", "heads", "head_dim", "tokens", "patch_size", "epochs", "images"):
            if getattr(self, option) < 1:
                raise OptionError(option, f"must be an integer >= 1, got {getattr(self, option)}")
        if self.tokens < 8:
            raise OptionError("tokens", f"must be at least 8 for rows that differ, got {self.tokens}")
        if self.head_dim % 2:
            raise OptionError("head_dim", f"must be even, since mirrors turn pairs of channels, got {self.head_dim}")
        if 1.0 not in self.scales or len(self.scales) < 2 or min(self.scales) <= 0:
            raise OptionError("scales", f"must be numbers above 0, 1 and another one among them, got {self.scales}")
        check_option("size", self.size, SIZES)
        self._check_checkpoint()

    @property
    def reads_text(self) -> bool:
        return self.checkpoint is not None and (self.checkpoint / "config.json").is_file()

    def _check_checkpoint(self) -> None:
        if self.checkpoint is None:
            return
        if not self.reads_text and not (self.checkpoint / "weights.pt").is_file():
            raise OptionError("checkpoint", f"must be a folder with weights.pt or config.json, got {self.checkpoint}")
        if self.reads_text and (self.text is None or not self.text.is_file()):
            raise OptionError("text", f"must be a file for the language model to read, got {self.text}")
        if not self.reads_text and len(self.hosts) != 1:
            raise OptionError("hosts", "must be the one mechanism that the checkpoint was trained with")


QUICK: dict[str, Any] = {
    "hosts": HOSTS[:1], "epochs": 1, "images": 4, "batch": 1, "heads": 2, "head_dim": 16, "tokens": 32,
}  # fmt: skip
