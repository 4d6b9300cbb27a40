"""Settings of a benchmark, checked before any work is done."""

from dataclasses import dataclass

import torch

from linattn.mechanisms.registry import list_mechanisms, mechanism_info
from linattn.ops.shared.call import IMPLEMENTATIONS
from linattn.support.options import OptionError, check_device, check_option

IMPLS = ("auto", *IMPLEMENTATIONS)
DECAYS = ("none", "head", "token", "channel")
DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class BenchConfig:
    """One benchmark. The defaults are the documented CPU table."""

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    impl: tuple[str, ...] = ("chunked", "recurrent", "reference")
    mechanisms: tuple[str, ...] = ()
    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    causal: bool = True
    decay: str = "none"
    dtype: str = "float32"
    device: str = "cpu"
    backward: bool = True
    memory: bool = True
    seed: int = 0
    min_seconds: float = 0.5  # of measured calls per row
    min_repeats: int = 5
    max_seconds: float = 5.0  # predicted for one call: slower contenders are left out
    max_gib: float | None = None  # predicted peak; None: half of the free memory

    def check(self) -> None:
        """Raise an OptionError that names the option and what is allowed."""
        self._check_numbers()
        for impl in self.impl:
            check_option("impl", impl, IMPLS)
        check_option("decay", self.decay, DECAYS)
        check_option("dtype", self.dtype, DTYPES)
        for name in self.mechanisms:
            self._check_mechanism(name)
        if not self.impl and not self.mechanisms:
            raise OptionError("impl", "name at least one implementation or one mechanism")
        check_device(self.device)

    def _check_numbers(self) -> None:
        if not self.lengths or any(T < 1 for T in self.lengths):
            raise OptionError("lengths", f"must be integers >= 1, got {_join(self.lengths) or 'none'}")
        for option in ("batch", "heads", "head_dim", "min_repeats"):
            if getattr(self, option) < 1:
                raise OptionError(option, f"must be an integer >= 1, got {getattr(self, option)}")
        for option in ("max_seconds", "max_gib"):
            value = getattr(self, option)
            if value is not None and not value > 0:
                raise OptionError(option, f"must be greater than 0, got {value}")

    def _check_mechanism(self, name: str) -> None:
        check_option("mechanisms", name, list_mechanisms())
        info = mechanism_info(name)
        if not (info.causal if self.causal else info.bidirectional):
            kind = "causal" if self.causal else "bidirectional"
            able = list_mechanisms(causal=True) if self.causal else list_mechanisms(bidirectional=True)
            raise OptionError("mechanisms", f"{name} is not {kind}; these are: {_join(able)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def name(self) -> str:
        """Name of the files: what was measured, without the lengths."""
        parts = ["attention", "causal" if self.causal else "bidirectional"]
        parts += [] if self.decay == "none" else [f"{self.decay}-decay"]
        parts += [] if self.dtype == "float32" else [self.dtype]
        return "-".join([*parts, *self.mechanisms])


def _join(values: tuple[int, ...] | tuple[str, ...] | list[str]) -> str:
    return ", ".join(map(str, values))
