"""Settings of a table of memory by tokens, checked before any work is done."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from linattn.mechanisms.registry import create_mechanism, list_mechanisms
from linattn.support import machine
from linattn.support.options import OptionError, check_device, check_option

PRECISIONS = ("auto", "fp32", "bf16")
TOKENS = (196, 784, 3136, 6400, 12544, 25600, 50176, 70000)
COUNTED = (
    "peak_bytes: the most that forward and backward of one block allocate at one time. Counted: the input, the output, "
    "what is kept for backward, temporaries, and the gradients of output, input and parameters. Not counted: the "
    "parameters themselves (fp32; their copies in bf16 under autocast do count). softmax (map) keeps its map in fp32."
)


@dataclass(frozen=True)
class BlocksConfig:
    """Settings of one table; the defaults are the documented one, with the width and heads of DeiT-tiny."""

    tokens: tuple[int, ...] = TOKENS
    mechanisms: tuple[str, ...] = ("mirror", "nala")
    dim: int = 192
    heads: int = 3
    batch: int = 1
    precision: str = "auto"
    device: str = "cpu"
    seed: int = 0
    repeats: int = 3  # of the timed pass; memory is measured once
    max_seconds: float = 30.0  # predicted for one pass: slower rows are left out
    max_gib: float | None = None  # predicted peak; None: half of what is free on a CPU, no limit on a GPU

    def check(self) -> None:
        """Raise an OptionError that names the option and what is allowed."""
        if not self.tokens or any(T < 1 for T in self.tokens):
            raise OptionError("tokens", f"must be integers >= 1, got {', '.join(map(str, self.tokens)) or 'none'}")
        for option in ("dim", "heads", "batch", "repeats"):
            if getattr(self, option) < 1:
                raise OptionError(option, f"must be an integer >= 1, got {getattr(self, option)}")
        for option in ("max_seconds", "max_gib"):
            value = getattr(self, option)
            if value is not None and not value > 0:
                raise OptionError(option, f"must be greater than 0, got {value}")
        if self.dim % self.heads:
            raise OptionError("heads", f"must divide dim, got {self.heads} heads and dim {self.dim}")
        check_option("precision", self.precision, PRECISIONS)
        check_device(self.device)
        if not self.mechanisms:
            raise OptionError("mechanisms", f"name at least one of {', '.join(list_mechanisms(bidirectional=True))}")
        for name in self.mechanisms:
            check_option("mechanisms", name, list_mechanisms(bidirectional=True))
            try:
                create_mechanism(name, num_heads=self.heads, head_dim=self.dim // self.heads)
            except ValueError as error:  # a width that this mechanism cannot have
                raise OptionError("mechanisms", f"{name}: {error}") from error

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def autocast(self) -> bool:
        """Whether to run bf16 around fp32 weights, as in training on a GPU; on a CPU only if asked for."""
        return self.precision == "bf16" or (self.precision == "auto" and self.torch_device.type == "cuda")

    def describe(self, command: list[str] | None = None) -> dict[str, Any]:
        """The ``meta`` of a result."""
        settings = asdict(self) | {"precision": "bf16" if self.autocast else "fp32"}
        device = self.torch_device
        total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        meta = machine.describe_run(device, command)
        return meta | {"seed": self.seed, "settings": settings, "counted": COUNTED, "device_memory_bytes": total}
