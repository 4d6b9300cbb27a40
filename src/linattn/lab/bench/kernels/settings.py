"""Settings of a race of kernels, checked before any work is done."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from linattn.lab.bench.kernels.cases import Case, select
from linattn.lab.bench.kernels.contenders import RIVALS
from linattn.lab.bench.kernels.rivals import versions
from linattn.support import machine
from linattn.support.options import OptionError, check_device, check_option

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class KernelsConfig:
    """Settings of one run. ``quick`` shrinks every shape, so that all of it also runs on a CPU."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    cases: tuple[str, ...] = ()  # none: all
    contenders: tuple[str, ...] = ()  # those whose names start so; none: all
    rivals: tuple[str, ...] = RIVALS  # groups of rivals
    quick: bool = False
    seconds: float = 540.0  # after this nothing new is begun
    milliseconds: float = 60.0  # of measured calls per row
    processes: int = 0  # that compile beforehand; 0: each contender compiles when it is timed
    cold: bool = False  # also time the first call in fresh processes with empty caches
    seed: int = 0

    def check(self) -> None:
        """Raise an OptionError that names the option and what is allowed."""
        check_device(self.device)
        check_option("dtype", self.dtype, DTYPES)
        select(self.cases)
        for rival in self.rivals:
            check_option("rivals", rival, RIVALS)
        if self.processes < 0:
            raise OptionError("processes", f"must be an integer >= 0, got {self.processes}")
        for option in ("seconds", "milliseconds"):
            if not getattr(self, option) > 0:
                raise OptionError(option, f"must be greater than 0, got {getattr(self, option)}")
        if self.torch_device.type == "cpu" and not self.quick:
            raise OptionError(
                "device", "kernels are timed on a GPU; on a CPU use --quick, which only shows that it runs"
            )

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def selected(self) -> list[Case]:
        return [case.quick() if self.quick else case for case in select(self.cases)]

    def wants(self, contender: str) -> bool:
        return not self.contenders or contender.startswith(self.contenders)

    def describe(self, command: list[str] | None = None) -> dict[str, Any]:
        """The ``meta`` of a result."""
        meta = machine.describe_run(self.torch_device, command)
        meta["versions"] |= versions()
        return meta | {"seed": self.seed, "settings": asdict(self)}
