"""Settings that all benchmarks of language models share, checked before any work is done."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from linattn.lab.bench.kernels.rivals import versions
from linattn.lab.bench.language.sizes import FULL, TINY, ModelSize
from linattn.lab.bench.models.cases import SOFTMAX, VARIANTS, variant
from linattn.mechanisms.registry import list_mechanisms, mechanism_info
from linattn.support import machine
from linattn.support.options import OptionError, check_device, check_option

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MECHANISMS = ("gated", "mlstm", "retention", "elu")


@dataclass(frozen=True)
class LanguageConfig:
    """Settings of one run. ``quick`` takes a tiny model, so that all of it also runs on a CPU."""

    device: str = "cuda"
    mechanisms: tuple[str, ...] = MECHANISMS  # softmax is always included
    dtype: str = "bfloat16"
    kv_heads: int = 0  # 0: as many as there are heads
    quick: bool = False
    seconds: float = 540.0  # after this nothing new is begun
    seed: int = 0

    def check(self) -> None:
        """Raise an OptionError that names the option and what is allowed."""
        check_device(self.device)
        check_option("dtype", self.dtype, DTYPES)
        allowed = [*list_mechanisms(causal=True), *(v for v, (name, _) in VARIANTS.items() if name)]
        for name in self.mechanisms:
            check_option("mechanisms", name, allowed)
        if not self.seconds > 0:
            raise OptionError("seconds", f"must be greater than 0, got {self.seconds}")
        heads = self.base_size.heads
        if self.kv_heads and (self.kv_heads < 0 or heads % self.kv_heads):
            raise OptionError("kv_heads", f"must divide the model's {heads} heads, got {self.kv_heads}")

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def base_size(self) -> ModelSize:
        return TINY if self.quick else FULL

    @property
    def size(self) -> ModelSize:
        return replace(self.base_size, kv_heads=self.kv_heads or self.base_size.heads)

    @property
    def subjects(self) -> list[str]:
        """The mechanisms, softmax first."""
        return list(dict.fromkeys((SOFTMAX, *self.mechanisms)))

    def needs_state(self) -> None:
        """Raise if a mechanism cannot decode."""
        for name in self.mechanisms:
            if mechanism_info(variant(name)[0]).state == "none":
                raise OptionError("mechanisms", f"{name} has no recurrent form, so no state to decode from")

    def describe(self, command: list[str] | None = None) -> dict[str, Any]:
        """The ``meta`` of a result."""
        meta = machine.describe_run(self.torch_device, command)
        meta["versions"] |= {"triton": versions()["triton"]}
        if self.torch_device.type == "cuda":
            meta["device_memory_bytes"] = torch.cuda.get_device_properties(self.torch_device).total_memory
        return meta | {"seed": self.seed, "settings": asdict(self), "model": asdict(self.size)}

    def comparable(self) -> dict[str, Any]:
        """The settings that an earlier run must share for its rows to be kept beside those of this one."""
        return {"quick": self.quick, "seed": self.seed, "dtype": self.dtype, "kv_heads": self.kv_heads}


def check_numbers(option: str, numbers: tuple[int, ...]) -> None:
    if not numbers or min(numbers) < 1:
        raise OptionError(option, f"must be integers >= 1 with commas between them, got {numbers}")
