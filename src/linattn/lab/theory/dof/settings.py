"""The settings of the experiment, in one frozen value."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn.support.options import OptionError

COUNTS = (16, 32, 64, 128, 256, 512, 1024)
FILES = (".npz", ".pt", ".safetensors")


@dataclass(frozen=True)
class DofConfig:
    """Points, features and repetitions; the default takes under two minutes on one core.

    Attributes:
        counts: numbers of features M.
        seeds: how often features are drawn for each number.
        points: J, the number of queries and keys on which the kernel is evaluated.
        tolerance: lambda in units of the kernel's largest eigenvalue.
        heads: number of heads from each source, spread over its layers.
        dim, norm: of random activations: D, and the mean of ``|x|^2 / sqrt(D)``.
        activations: a file with q ``(B, H, T, D)`` and k ``(B, H_kv, T, D)``, or a folder with a pretrained model.
        text: file that the model reads; None: what it generates itself.
        delta: the bound holds with probability ``1 - 2 delta``.
    """

    counts: tuple[int, ...] = COUNTS
    seeds: int = 5
    points: int = 384
    tolerance: float = 2**-4
    heads: int = 4
    dim: int = 32
    norm: float = 1.5
    activations: Path | None = None
    text: Path | None = None
    delta: float = 0.05
    seed: int = 0

    def check(self) -> None:
        """Raise OptionError that names the option and what is allowed."""
        if len(set(self.counts)) < 2 or min(self.counts) < 1:
            raise OptionError("counts", f"must be at least two different integers >= 1, got {self.counts}")
        for name, least in (("seeds", 2), ("points", 8), ("heads", 1), ("dim", 1)):
            if getattr(self, name) < least:
                raise OptionError(name, f"must be an integer >= {least}, got {getattr(self, name)}")
        for name in ("tolerance", "norm"):
            if not getattr(self, name) > 0:
                raise OptionError(name, f"must be a number > 0, got {getattr(self, name)}")
        if not 0 < self.delta < 0.5:
            raise OptionError("delta", f"must lie between 0 and 0.5, got {self.delta}")
        real = self.activations
        if real is not None and not ((real.is_file() and real.suffix in FILES) or (real / "config.json").is_file()):
            kinds = ", ".join(FILES)
            raise OptionError(
                "activations", f"must be a file ({kinds}) or a model's folder with config.json, got {real}"
            )
        if self.text is not None and not self.text.is_file():
            raise OptionError("text", f"must be a file, got {self.text}")


QUICK: dict[str, Any] = {"counts": (16, 64), "seeds": 2, "points": 48, "heads": 1, "dim": 8}
LARGE: dict[str, Any] = {"counts": (*COUNTS, 2048, 4096), "seeds": 10, "points": 1024, "heads": 12}
