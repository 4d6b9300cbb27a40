"""Settings of a benchmark of training throughput, checked before any work is done."""

from dataclasses import dataclass
from typing import Any

from linattn.lab.bench.language.settings import LanguageConfig, check_numbers
from linattn.lab.bench.models.settings import BACKENDS
from linattn.support.options import OptionError, check_option

LENGTHS = (2048, 8192, 32768)
QUICK_LENGTHS = (16, 32, 64)


@dataclass(frozen=True)
class ThroughputConfig(LanguageConfig):
    """Settings of one run. ``dtype`` is that of autocast around fp32 weights; float32: no autocast."""

    lengths: tuple[int, ...] = LENGTHS
    tokens: int = 32768  # per step, in as many sequences as that makes
    backend: str = "inductor"
    steps: int = 6  # timed steps

    def check(self) -> None:
        super().check()
        check_numbers("lengths", self.lengths)
        for length in self.lengths:
            if self.tokens < length or self.tokens % length:
                raise OptionError("tokens", f"must be a multiple of every length, got {self.tokens} for {length}")
        check_option("backend", self.backend, BACKENDS)
        if self.steps < 1:
            raise OptionError("steps", f"must be an integer >= 1, got {self.steps}")

    @property
    def autocast(self) -> bool:
        return self.dtype != "float32"

    def comparable(self) -> dict[str, Any]:
        return super().comparable() | {"tokens": self.tokens, "backend": self.backend}
